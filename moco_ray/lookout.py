"""When the loop looks up from its work: a machine about to be taken away, a save that somebody asks for, an hour gone by.

Every rank looks at the same steps and comes to the same answer. Not responsible for the schedule of the recipe (train.py)
nor for how a checkpoint is written (saver.py).
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from moco_ray.checkpoint import Saved
from moco_ray.ranks import Ranks

LOOK_SECONDS = 1.0  # between two looks, about: they cost some milliseconds, and a job that is stopped has 3 s
LAST_SAVE_SECONDS = 8.0  # before a machine goes, at least, the last save begins


class Notice(NamedTuple):
    """Machines of these ranks will be taken away."""

    ranks: tuple[int, ...]
    deadline: float | None  # UNIX time in seconds, where it is known


class Advice(NamedTuple):
    """What the loop is to do after this step."""

    save: str = ""  # why a checkpoint is to be written now, though none is due; "" for no
    halt_until: float = 0.0  # UNIX time: after that save no step is worth beginning, for it would be lost
    saved: Saved | None = None  # a checkpoint that has become whole
    stop: bool = False  # after that save the run ends


class News(NamedTuple):
    """Where rank 0 hears of what is outside the loop."""

    notice: Callable[[], Notice | None]
    order: Callable[[], tuple[str, float] | None]  # to save: why, and when it was given
    saved: Callable[[], Saved | None]  # the newest checkpoint that became whole since it was last asked
    stop: Callable[[], str] = lambda: ""  # why the run is to end; "" for it is not


class Lookout:
    """One rank's. Rank 0's clock decides, and its answer goes to all."""

    def __init__(self, ranks: Ranks, news: News, minutes: float, start_step: int):
        """`minutes`: a checkpoint is written at the latest so long after the one before; 0 for the schedule alone."""
        self._ranks, self._news = ranks, news
        self._every_seconds = minutes * 60 or float("inf")
        self._saved_at = self._looked_at = time.monotonic()
        self._looked_at_step, self._next_look = start_step, start_step + 1
        self._obeyed, self._noticed, self._halted = None, None, False

    def saved(self) -> None:
        """A checkpoint is being written for a reason of the recipe's."""
        self._saved_at = time.monotonic()

    def look(self, step: int) -> Advice:
        """After `step` completed steps. Collective at some of them, free at the others."""
        if step < self._next_look:
            return Advice()
        mine = None
        if self._ranks.is_first:
            mine = (self._decide(self._news.notice())._replace(saved=self._news.saved()), self._steps_to_next(step))
        advice, steps = self._ranks.gather_objects(mine)[0]
        self._next_look = step + steps
        if advice.save:
            self._saved_at = time.monotonic()
        return advice

    def _decide(self, notice: Notice | None) -> Advice:
        order, stop = self._news.order(), self._news.stop()
        if stop:
            return Advice(stop, stop=True)
        if notice and notice.deadline and not self._halted and time.time() > notice.deadline - LAST_SAVE_SECONDS:
            self._halted = True
            return Advice(_told(notice) + ", and this is the last moment", notice.deadline)
        if notice and notice.ranks != self._noticed:  # at once, and again at the last moment
            self._noticed = notice.ranks
            return Advice(_told(notice))
        if order and order != self._obeyed:
            self._obeyed = order
            return Advice(order[0])
        if time.monotonic() - self._saved_at > self._every_seconds:
            return Advice(f"{self._every_seconds / 60:g} minutes have passed since the last")
        return Advice()

    def _steps_to_next(self, step: int) -> int:
        now = time.monotonic()
        a_step = (now - self._looked_at) / max(1, step - self._looked_at_step)
        self._looked_at, self._looked_at_step = now, step
        return max(1, min(1000, int(LOOK_SECONDS / max(a_step, 1e-6))))


def _told(notice: Notice) -> str:
    left = f" in {notice.deadline - time.time():.0f} s" if notice.deadline else ""
    return f"the machine of worker {', '.join(map(str, notice.ranks))} is taken away{left}"
