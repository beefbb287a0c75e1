"""For how many workers an elastic run asks an autoscaler.

Ray's second autoscaler, KubeRay's, makes room for all that is asked for or for nothing of it (read in the source of Ray 2.60, and seen): a run that asks for
eight workers on a cluster of at most four would get none. So what was refused is asked for again with fewer, by halves. Ray's first autoscaler starts what
it can and refuses nothing. Responsible for the number alone; Ray Train asks (in its controller, where this runs), and places the workers.
"""

import time
from collections.abc import Callable
from typing import Any

import ray.train

from moco_ray.cluster import autoscaler_refuses
from moco_ray.plan import Workers
from moco_ray.session import Room

LOOK_SECONDS = 5.0  # between two looks at what the autoscaler says
SETTLE_SECONDS = 30.0  # from a change of the number to its answer: Ray Train asks every 20 s, the autoscaler works every 5
AGAIN_SECONDS = 600.0  # until all are asked for once more: limits change


class Asking:
    """The number, as answers come in."""

    def __init__(
        self, workers: Workers, fits: Callable[[], int], refused: Callable[[], bool], tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):
        """`fits()`: how many workers the living machines hold. `refused()`: whether the autoscaler has no way to what it is asked for."""
        self._least, self._most = max(1, workers.least), workers.most
        self._fits, self._refused, self._tell, self._clock = fits, refused, tell, clock
        self._number, self._too_many = self._most, self._most + 1  # the second: the fewest that were refused
        self._changed = self._looked = clock()
        self._told = False

    def number(self) -> int:
        """For how many to ask now: at least those that fit, at most what the user wants."""
        now = self._clock()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            fit = min(max(self._fits(), self._least), self._most)
            wanted = self._wanted(now - self._changed, fit)
            if wanted != self._number:
                self._number, self._changed = wanted, now
        return self._number

    def _wanted(self, age_seconds: float, fit: int) -> int:
        if age_seconds < SETTLE_SECONDS:
            return max(self._number, fit)
        if self._refused():
            if self._number <= fit:  # what is refused is of another, or of data tasks
                return fit
            self._too_many = self._number
            wanted = (fit + self._too_many) // 2
            if not self._told:
                self._told = True
                self._tell(f"the autoscaler has no way to room for {self._number} workers, and makes all at once or none: asking for {wanted}")
            return wanted
        if self._number <= fit < self._too_many - 1:  # all are there: half of what is left
            return (fit + self._too_many) // 2
        if self._number < self._most and age_seconds >= AGAIN_SECONDS:
            self._too_many = self._most + 1
            return self._most
        return max(self._number, fit)


class Elastic(ray.train.ScalingConfig):
    """Ray Train's configuration of an elastic run; in its controller the most workers are those that are worth asking for."""

    def watch(self, room: Room, board: Any) -> "Elastic":
        """Begin to, wherever this travels."""
        self._watching, self._asking = (room, board), None
        return self

    @property
    def max_workers(self) -> int:
        watching = getattr(self, "_watching", None)
        if watching is None or not isinstance(self.num_workers, tuple):
            return super().max_workers
        if self._asking is None:
            room, board = watching
            workers = Workers(self.num_workers[1], self.num_workers[0])
            self._asking = Asking(workers, room.fits, autoscaler_refuses, lambda text: board.post.remote({"kind": "asking", "text": text}))
        return self._asking.number()
