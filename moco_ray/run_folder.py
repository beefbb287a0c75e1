"""The run folder: what lies where under `storage/name`, how it is made, and when it is refused.

Responsible for names and for the facts written once (recipe, plan, manifest, code version). Not responsible for
checkpoints' content (checkpoint.py) nor for metrics (monitor.py).
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moco_ray.checkpoint import newest, step_of
from moco_ray.data.shards import Manifest
from moco_ray.errors import UserError
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. `path` must be reachable under the same name from every node of the cluster."""

    path: Path

    @classmethod
    def at(cls, storage: str, name: str) -> "RunFolder":
        """The folder of a run that may not exist yet. Raises UserError for what is not a local folder."""
        _refuse_uri(storage)
        if not name or "/" in name or name.startswith("."):
            raise UserError(f"--name {name!r} must be a folder name without '/' that does not begin with '.'")
        return cls(Path(storage).absolute() / name)

    @classmethod
    def existing(cls, run: str) -> "RunFolder":
        """The folder of a run that was started. Raises UserError if there is none."""
        _refuse_uri(run)
        folder = cls(Path(run).absolute())
        if not folder.facts.is_file():
            raise UserError(
                f"{run} is no run folder (it has no run.json); give the path that `moco-ray pretrain` printed"
            )
        return folder

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.parquet"

    @property
    def facts(self) -> Path:
        return self.path / "run.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts.jsonl"

    def refuse_if_taken(self, recipe: Recipe) -> None:
        """Raise UserError if a run lies here already, whatever its recipe: going on must be asked for."""
        if not self.facts.exists():
            if self.path.exists() and any(self.path.iterdir()):
                raise UserError(f"{self.path} is not empty and no run folder; choose another --storage or --name")
            return
        held = Recipe.read(self.recipe)
        if held.fingerprint() != recipe.fingerprint():
            raise UserError(
                f"{self.path} already holds a run of another recipe ({'; '.join(held.differences(recipe)[:4])}); "
                "choose another --name"
            )
        last = newest(self.checkpoints)
        reached = f"its newest checkpoint is of step {step_of(last)}" if last else "it has no checkpoint yet"
        raise UserError(
            f"{self.path} already holds this run ({reached}); go on with `moco-ray resume {self.path}`, or choose another --name"
        )

    def create(self, recipe: Recipe, plan: Plan, manifest: Manifest) -> None:
        """Write the facts of a new run; run.json last, for it makes the folder a run."""
        with told_as_user_error(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.recipe, recipe.toml())
            write_whole(self.plan, json.dumps(plan.facts(), indent=1))
            manifest.save(self.manifest)
            write_whole(self.facts, json.dumps({**code_version(), "data_fingerprint": manifest.fingerprint}, indent=1))

    def update(self, recipe: Recipe, manifest: Manifest) -> None:
        """Write what a resumed run may change: intervals, and the data's address."""
        with told_as_user_error(self.path):
            if self.recipe.read_text(encoding="utf-8") != recipe.toml():
                write_whole(self.recipe, recipe.toml())
            if Manifest.load(self.manifest).root != manifest.root:
                manifest.save(self.manifest)

    def add_attempt(self, workers: int, from_step: int) -> None:
        """Note that the run is carried from `from_step` by `workers`, with the code as it is now."""
        note = {**code_version(), "workers": workers, "from_step": from_step}
        with told_as_user_error(self.path), self.attempts.open("a") as file:
            file.write(json.dumps(note) + "\n")

    def last_workers(self) -> int:
        """How many workers carried the run last; 1 if none did yet."""
        lines = self.attempts.read_text().splitlines() if self.attempts.exists() else []
        return json.loads(lines[-1])["workers"] if lines else 1

    @contextlib.contextmanager
    def locked(self):
        """Hold the run for this process. Raises UserError if another process of this machine carries it."""
        with told_as_user_error(self.path):
            file = (self.path / "lock").open("a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(f"{self.path} is being carried by {file.read()}; wait for it, or stop it") from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield


def write_whole(path: Path, text: str) -> None:
    """Write a small file under another name and rename it, so that a full disk leaves the old one as it was."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


@contextlib.contextmanager
def told_as_user_error(place: Path):
    """Turn an operating system's refusal to write below `place` into a UserError with the cure."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write in {place}: {error.strerror or error}; make room or mend the storage, then start or resume"
        ) from error


def code_version() -> dict[str, Any]:
    """Date, release, git commit and dirty flag ("" outside a checkout), and the versions that compute."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        try:
            answer = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return answer.stdout.strip() if answer.returncode == 0 else ""

    packages = ("moco_ray", "torch", "torchvision", "torchcodec", "ray", "pyarrow", "numpy")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def _refuse_uri(place: str) -> None:
    if "://" in place:
        raise UserError(
            f"{place}: only folders are supported as storage yet; give a local path, on a cluster one that all nodes share"
        )
