"""The progress of a run as a person at a terminal sees it. Not here: where the numbers come from."""

import math
import sys
import time
from collections import deque
from typing import Any, TextIO

from tqdm import tqdm

from moco_ray.pace import RATE_RECORDS, seconds_left
from moco_ray.plan import Plan
from moco_ray.stages import LINE_SECONDS
from moco_ray.words import duration, note


class Progress:
    """A bar on a terminal; elsewhere (a job's log) a line now and then. Fed with entries of metrics.jsonl."""

    def __init__(self, plan: Plan, start_step: int, out: TextIO = sys.stderr):
        self._plan, self._total, self._epochs, self._out = plan, plan.total_steps, plan.epochs, out
        self._last_line, self._knn = -LINE_SECONDS, ""
        self._written: deque[dict[str, Any]] = deque(maxlen=RATE_RECORDS)  # what metrics.jsonl ends with, as who watches the run reads it
        self._again: deque[dict[str, Any]] = deque(maxlen=RATE_RECORDS)  # computed again after a restart, and written by none
        self._safe_step, self._reached = start_step, start_step
        self._bar = None
        if out.isatty():
            shape = "{percentage:3.0f}%|{bar:20}| {desc}"
            self._bar = tqdm(total=self._total, initial=start_step, file=out, bar_format=shape, dynamic_ncols=True)
            self._bar.set_description_str(f"step {start_step}/{self._total} · starting workers")

    def show(self, entry: dict[str, Any], new: bool = True) -> None:
        """One entry: training scalars, or an evaluation, which stays on show. Not `new`: computed before a restart too."""
        if "knn_top1" in entry and new:
            self._knn = f" · kNN {entry['knn_top1']:.1%}"
        if "loss" not in entry:
            return
        self._reached = max(self._reached, entry["step"])
        records = self._written if new else self._again
        records.append(entry)
        left = seconds_left(self._plan, list(records), entry["step"])
        where = f"epoch {entry['epoch']:.2f}/{self._epochs:.4g} · step {entry['step']}/{self._total}"
        if not new:
            where += f" again, up to {self._reached}"
        state = (
            f"loss {entry['loss']:.3f} (chance {entry['chance_loss']:.2f}) · {entry['images_per_second']:.0f} img/s · "
            f"input wait {entry['input_wait_share']:.0%} · {duration(math.nan if left is None else left)} left{self._knn}"
        )
        if entry.get("queue_fill", 1.0) < 1.0:
            state += f" · queue {entry['queue_fill']:.0%} full"
        state += f" · safe at {self._safe_step}"
        if self._bar is not None:
            self._bar.n = self._reached
            self._bar.set_description_str(f"{where} · {state}")
        elif time.monotonic() - self._last_line > LINE_SECONDS or entry["step"] == self._total:
            self._last_line = time.monotonic()
            self.say(f"{where} · {state}")

    def safe(self, step: int) -> None:
        """The step of the newest checkpoint: what a failure now would go back to."""
        self._safe_step = step

    def say(self, line: str) -> None:
        """One line that stays, above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._out)
        else:
            note(line, self._out)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
