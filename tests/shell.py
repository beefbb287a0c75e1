"""Commands of this project in processes of their own, with a Ray of their own: started, watched and killed.

Not responsible for what they do.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


class Shell:
    """Runs `moco-ray` in one folder, with a Ray of its own below a short temporary folder (it holds sockets)."""

    def __init__(self, folder: Path, variables: dict[str, str]):
        self.folder, self._variables, self._ray = folder, variables, tempfile.mkdtemp(prefix="ray", dir="/tmp")

    def start(self, *words: str, module: str = "moco_ray") -> subprocess.Popen:
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        environment |= {**self._variables, "RAY_TMPDIR": self._ray}
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def kill(self, process: subprocess.Popen) -> None:
        """End a command and all that it started at once, as a machine that loses its power."""
        os.killpg(process.pid, signal.SIGKILL)
        for folder in self._daemons():
            with contextlib.suppress(OSError):
                os.kill(int(folder.name), signal.SIGKILL)
        process.communicate()

    def _daemons(self) -> list[Path]:
        """Ray's own processes, which lead sessions of their own: the folder of its Ray is in their command lines."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._ray.encode() in (folder / "cmdline").read_bytes():
                    found.append(folder)
        return found

    def peak_worker_bytes(self) -> int:
        """The largest resident size that a worker of its Ray now living has ever had."""
        raylets, peak = {folder.name for folder in self._daemons()}, 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
                if status["PPid"].strip() in raylets and (folder / "cmdline").read_bytes().startswith(b"ray::"):
                    peak = max(peak, int(status.get("VmHWM", "0 kB").split()[0]) << 10)
        return peak

    def run(self, *words: str, module: str = "moco_ray") -> tuple[int, str, str]:
        process = self.start(*words, module=module)
        out, error = process.communicate(timeout=400)
        return process.returncode, out, error

    def close(self) -> None:
        shutil.rmtree(self._ray, ignore_errors=True)
