"""The stages of a command as a person sees them: which one it is at, how far and how long. Not here: a training's own (progress.py)."""

import threading
import time
from typing import Any, TextIO

from tqdm import tqdm

from moco_ray import words

LINE_SECONDS = 15.0  # between two lines where the output is no terminal
BRIEF_SECONDS = 1.0  # a stage that is over before that is not told of
REDRAW_SECONDS = 1.0  # of a bar while nothing moves, for its clock


class Stages:
    """`with Stages(sys.stderr) as at: at("reading", 3, 7, "files")`: a bar for each stage on a terminal; elsewhere a line now and then, also
    while nothing moves, and one at the end of a stage. From any thread.
    """

    def __init__(self, out: TextIO):
        self._out, self._lock, self._stop, self._thread = out, threading.RLock(), threading.Event(), None
        self._what, self._done, self._total, self._unit, self._note = "", 0, 0, "", ""
        self._began = self._next_line = time.monotonic()
        self._next_line += LINE_SECONDS
        self._first = 0  # how far the stage was when it was first heard of
        self._bar: Any = None

    def __enter__(self) -> "Stages":
        self._thread = threading.Thread(target=self._tick, name="stages", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self._close_bar()

    def __call__(self, what: str, done: int = 0, total: int = 0, unit: str = "", note: str = "") -> None:
        """`done` of `total` of the stage `what`; total 0: nobody knows. `note`: what it is at."""
        with self._lock:
            if what != self._what:
                self._close_bar()
                self._what, self._first, self._began = what, done, time.monotonic()
            self._done, self._total, self._unit, self._note = done, total, unit, note
            over = 0 < total == done and time.monotonic() - self._began >= BRIEF_SECONDS
            if self._out.isatty():
                self._draw()
            elif over or time.monotonic() > self._next_line:
                self._print()

    def say(self, line: str) -> None:
        """One line that stays, above the bar."""
        with self._lock:
            if self._bar is not None:
                self._bar.write(line, file=self._out)
            else:
                words.note(line, self._out)

    def _tick(self) -> None:
        while not self._stop.wait(min(REDRAW_SECONDS, LINE_SECONDS)):
            with self._lock:
                if self._bar is not None:
                    self._bar.refresh()
                elif self._what and not self._out.isatty() and time.monotonic() > self._next_line:
                    self._print()

    def _draw(self) -> None:
        if self._bar is None:
            clock = None if self._total else "{desc} [{elapsed}]"
            self._bar = tqdm(
                total=self._total or None, initial=self._done, unit=f" {self._unit}", file=self._out, dynamic_ncols=True, delay=BRIEF_SECONDS, bar_format=clock
            )
        self._bar.set_description_str(f"{self._what}{self._where()}", refresh=False)
        self._bar.update(self._done - self._bar.n)

    def _print(self) -> None:
        self._next_line = time.monotonic() + LINE_SECONDS
        far = f": {self._done:,} of {self._total:,} {self._unit}" if self._total else ""
        seconds, moved = time.monotonic() - self._began, self._done - self._first
        left = f", {words.duration(seconds * (self._total - self._done) / moved)} left" if moved > 0 and self._done < self._total else ""
        words.note(f"{self._what}{far}{self._where()}, {words.duration(seconds)}{left}", self._out)

    def _where(self) -> str:
        return f" ({self._note})" if self._note else ""

    def _close_bar(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.close()
            self._bar = None
