"""Which moco_ray this is: its release, and the git commit of its source.

Where a job brings the package along there is no checkout and nothing installed: what `moco-ray submit` knew is in the environment.
"""

import importlib.metadata
import os
import subprocess
from pathlib import Path

RELEASE, COMMIT, DIRTY = "MOCO_RAY_RELEASE", "MOCO_RAY_GIT_COMMIT", "MOCO_RAY_GIT_DIRTY"
PACKAGE = Path(__file__).parent


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Name -> version of each, as installed; "" for what is not. moco_ray's is the release that was submitted, if it is not installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = os.environ.get(RELEASE, "") if name == "moco_ray" else ""
    return found


def git_state() -> tuple[str, bool]:
    """Commit of this source, and whether files that git knows were changed; ("", False) where that is not known."""
    if COMMIT in os.environ:
        return os.environ[COMMIT], os.environ.get(DIRTY) == "1"
    return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--untracked-files=no"))


def as_variables() -> dict[str, str]:
    """What a process elsewhere is to have in its environment, to know what this one knows."""
    commit, dirty = git_state()
    return {RELEASE: versions(("moco_ray",))["moco_ray"], COMMIT: commit, DIRTY: str(int(dirty))}


def _git(*words: str) -> str:
    try:
        answer = subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
