"""The parts of a training step, as the loop names them: ranges of a profiler's trace, and a clock of their shares.

Not responsible for when it is looked (step_profile.py).
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import record_function

NAMES = (
    "input", "augment", "exchange", "key forward", "query forward", "loss", "backward", "all-reduce", "optimizer",
    "momentum", "enqueue", "metrics",
)  # fmt: skip
OTHER = "other"


class Parts:
    """`with parts("loss"):` around a part of a step. A part within another is not counted into that one.

    While the clock runs, each beginning and end of a part is noted: the host's time, or on a GPU an event on the stream that
    computes, so that nothing waits for the device.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.on_gpu = torch.device(device).type == "cuda"
        self._now = OTHER
        self._stream: Any = None  # that computes
        self._notes: list[tuple[str, Any]] | None = None  # what is going on from then on, and when; None: no clock runs

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        assert name in NAMES, name
        outer = self._now
        with record_function(name):
            self.turn(name)
            try:
                yield
            finally:
                self.turn(outer)

    def turn(self, name: str) -> None:
        """From now on it is this part, until the part around it ends; called by the thread that computes gradients too."""
        self._now = name
        if self._notes is not None:
            self._notes.append((name, self._time()))

    def start(self) -> None:
        """Let the clock run."""
        if self.on_gpu:
            self._stream = torch.cuda.current_stream()
        self._notes = [(self._now, self._time())]

    def stop(self) -> dict[str, float]:
        """Stop it: seconds of each part since it was started, which add up to all of that time. Waits for a GPU."""
        notes, self._notes = [*self._notes, (OTHER, self._time())], None
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = dict.fromkeys((*NAMES, OTHER), 0.0)
        for (name, began), (_, ended) in zip(notes, notes[1:], strict=False):
            seconds[name] += began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
        return seconds

    def _time(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)  # another may be current: of what is prepared beside
        return event
