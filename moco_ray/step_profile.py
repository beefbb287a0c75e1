"""A profile on request: a trace of some steps for TensorBoard or Perfetto, and where their time went.

Responsible for when it is looked, and for the words. It changes no number, and what fails costs the profile and not the run. Not
responsible for the parts of a step (parts.py, train.py) nor for where the trace lies (worker.py).
"""

import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from moco_ray.data.storage import Store, one_line
from moco_ray.errors import UserError
from moco_ray.parts import OTHER, Parts

FOLDER = "tensorboard/profile"  # in the run folder, where TensorBoard looks
WARM_UP_STEPS = 10  # of a start, which are not like the others; fewer where the run ends before
LEAST_WARM_UP_STEPS = 2
CLOSE_SECONDS = 60.0  # at the end of a run, for a trace that is still being written


class StepProfile:
    """Told of each completed step; traces some of them, and tells of it once."""

    def __init__(self, steps: int, parts: Parts, start_step: int, total_steps: int, written: Callable[[int, bytes], str], tell: Callable[..., None]):
        """`steps` at most: as many as the run has left behind the warm-up. `written(first step, trace)` writes it and returns its place. `tell`
        takes a message to the driver: of kind "profile" with step, text and seconds, or "no_profile" with step and why.
        """
        self._parts, self._written, self._tell = parts, written, tell
        self._first = start_step + max(LEAST_WARM_UP_STEPS, min(WARM_UP_STEPS, total_steps - start_step - steps))
        self._stop = min(self._first + steps, total_steps)  # steps first .. stop-1, counted from 0, are traced
        self._profiler: profile | None = None
        self._thread: threading.Thread | None = None
        self._over = False

    def completed(self, step: int) -> None:
        """After each step, with the number of those completed."""
        if self._over:
            return
        try:
            if self._stop <= self._first:
                raise UserError(f"it needs {LEAST_WARM_UP_STEPS} steps before it, and the run has none left after them")
            self._look(step)
        except Exception as error:  # noqa: BLE001  whatever it is, it costs the profile and not the run
            self._over = True
            self._fail(error)

    def close(self) -> None:
        """Wait a while for a trace that is being written."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _look(self, step: int) -> None:
        if step == self._first - 1:
            self._profiler = self._started()
        elif step == self._first:
            self._profiler.step()
            self._parts.start()
        elif self._first < step < self._stop:
            self._profiler.step()
        elif step == self._stop:
            self._over = True
            seconds = self._parts.stop()
            self._profiler.step()  # the schedule's last: it traces no more
            self._thread = threading.Thread(target=self._write, args=(seconds,), name="profile", daemon=True)
            self._thread.start()

    def _started(self) -> profile:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._parts.on_gpu else [])]
        # The first step that a profiler sees is slow: it is not kept.
        plan = schedule(wait=0, warmup=1, active=self._stop - self._first, repeat=1)
        profiler = profile(activities=activities, schedule=plan)
        profiler.start()
        return profiler

    def _write(self, seconds: dict[str, float]) -> None:
        """In a thread of its own: a trace may be large, and its storage slow."""
        try:
            with tempfile.TemporaryDirectory(prefix="moco-ray-profile-") as folder:
                path = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                place = self._written(self._first, path.read_bytes())
            self._tell(kind="profile", step=self._stop, text=text(seconds, self._first, self._stop, place), seconds=seconds)
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)
        self._profiler = None

    def _fail(self, error: Exception) -> None:
        self._tell(kind="no_profile", step=self._stop, why=one_line(error))


def text(seconds: dict[str, float], first: int, stop: int, place: str) -> str:
    """What was found, in one line: `seconds` of each part over the steps first .. stop-1."""
    whole = sum(seconds.values())
    shares = ", ".join(f"{name} {value / whole:.1%}" for name, value in seconds.items() if name != OTHER)
    return (
        f"profile of steps {first + 1} to {stop} on worker 0, {1000 * whole / (stop - first):.1f} ms each: {shares}, {OTHER} "
        f"{seconds[OTHER] / whole:.1%}; trace: {place}"
    )


def name_of(attempt: int, first: int) -> str:
    """The trace's name in the run folder; TensorBoard's plugin takes the number for a time."""
    return f"{FOLDER}/attempt{attempt}.{first + 1}.pt.trace.json"


def is_written(run: Store, attempt: int) -> bool:
    """Whether a trace of this attempt or of a later one is known to lie in the run folder."""
    try:
        numbers = [re.match(r"attempt(\d+)\.", entry.name) for entry in run.below(FOLDER).list()]
    except UserError:
        return False  # the storage tells its own troubles elsewhere
    return any(int(found[1]) >= attempt for found in numbers if found)
