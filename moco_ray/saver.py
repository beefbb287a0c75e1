"""Checkpoints written behind the loop's back: a step waits for the copy to host memory, and for no storage.

Responsible for the copy, the thread, and for what is said and done when a save fails. Not responsible for how a
checkpoint is made whole (checkpoint.py), nor for when one is due (train.py, lookout.py).
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from moco_ray.checkpoint import Saved
from moco_ray.errors import StorageFailing, UserError

FAILED_SAVES = 3  # in a row: then the run stops, for it computes what is lost at the next failure ..
OUTAGE_SECONDS = 900.0  # .. and not before so long, if it is a storage that may come back by itself
PAUSE_SECONDS = 10.0  # before the last checkpoint is tried again
LAST = 19  # the niceness of a thread that others go before; Ray's workers have 15


class Saver:
    """Rank 0's. `write(step, state)` makes a state (on the host) a whole checkpoint.

    `tell(**message)` hears of each: kind "saved" with step, bytes, seconds it took and seconds that the step waited,
    "not_saved" with the reason, or "skipped" when one is due while the one before is still being written.
    """

    def __init__(self, write: Callable[[int, dict[str, Any]], Saved], tell: Callable[..., None]):
        self._write, self._tell = write, tell
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=let_others_go_first)
        self._writing: Future | None = None
        self._failed: list[tuple[float, UserError]] = []  # since the last that succeeded, and when
        self._newest: Saved | None = None

    def save(self, step: int, state: dict[str, Any], wait: bool = False, must: bool = False) -> None:
        """Begin to write the state as it is now; with `must`, after the one that is being written; with `wait`, return
        when it is whole.

        With `wait`, and once FAILED_SAVES in a row have failed, raises UserError if this one fails too: a storage that may
        come back is tried for OUTAGE_SECONDS.
        """
        began = time.perf_counter()
        wait = wait or self._in_despair()
        if wait or must:
            self.finish()
        if self._writing is not None and not self._writing.done():
            self._tell(kind="skipped", step=step)
            return
        copy = host_copy(state)
        waited = time.perf_counter() - began
        self._writing = self._thread.submit(self._run, step, copy, waited)
        if not wait:
            return
        self.finish()
        while self._failed and not self._in_despair():  # this one must not be lost
            time.sleep(PAUSE_SECONDS)
            self._run(step, copy, waited)
        if self._failed:
            count = f"{len(self._failed)} checkpoints in a row could not be saved; the last: " if len(self._failed) > 1 else ""
            raise UserError(f"{count}{self._failed[-1][1]}")

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if one is; its failure is told, not raised."""
        if self._writing is not None:
            self._writing.result()

    def take_newest(self) -> Saved | None:
        """The newest checkpoint that became whole since this was last asked, if one did."""
        newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _in_despair(self) -> bool:
        """Whether the next failure is to be the last."""
        if self._writing is not None and self._writing.done():
            self._writing.result()  # what is no UserError is a fault of ours
        if len(self._failed) < FAILED_SAVES:
            return False
        began, last = self._failed[0][0], self._failed[-1][1]
        return not isinstance(last, StorageFailing) or time.monotonic() - began > OUTAGE_SECONDS

    def _run(self, step: int, state: dict[str, Any], waited: float) -> None:
        began = time.perf_counter()
        try:
            saved = self._write(step, state)
        except UserError as error:
            self._failed.append((time.monotonic(), error))
            self._tell(kind="not_saved", step=step, why=str(error))
            return
        self._failed.clear()
        self._newest = saved
        seconds = time.perf_counter() - began
        self._tell(kind="saved", step=step, bytes=saved.bytes, seconds=seconds, seconds_waited=waited)


def let_others_go_first() -> None:
    """This thread computes where a core is left. Otherwise one busy thread makes a step several times as long where the
    step has all cores: its threads wait for each other many thousand times, and so for the one whose core is shared.
    """
    if sys.platform == "linux":  # elsewhere niceness is a whole process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST)


def host_copy(value: Any) -> Any:
    """The same structure of dictionaries, lists and plain values, its tensors copied into host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: host_copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(host_copy(each) for each in value)
    return value
