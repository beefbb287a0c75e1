"""Which checkpoints are kept beside the newest ones: the best so far, and those that are still to be evaluated.

One small object `evaluations.json` in the run folder, written by the driver alone and read when checkpoints are pruned. Not
responsible for evaluating (evaluations.py) nor for pruning (checkpoint.py).
"""

import json
from typing import NamedTuple

from moco_ray.data.storage import Store
from moco_ray.errors import UserError

FILE = "evaluations.json"


class Best(NamedTuple):
    """The checkpoint whose backbone features did best so far."""

    name: str  # checkpoints/step-N.aM
    step: int
    knn_top1: float  # share, 0..1


class Standing(NamedTuple):
    """What the evaluations have come to."""

    best: Best | None = None
    waiting: tuple[str, ...] = ()  # names, the oldest first

    @classmethod
    def read(cls, run: Store) -> "Standing":
        """Of a run without evaluations an empty one. Raises UserError if it cannot be read."""
        if run.size(FILE) is None:
            return cls()
        try:
            held = json.loads(run.read(FILE))
            best = held["best"] and Best(str(held["best"]["name"]), int(held["best"]["step"]), float(held["best"]["knn_top1"]))
            return cls(best, tuple(map(str, held["waiting"])))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{run.place(FILE)} is damaged ({type(error).__name__}); remove it, and the next evaluation writes it anew") from error

    def write(self, run: Store) -> None:
        best = self.best and self.best._asdict()
        run.write(FILE, json.dumps({"best": best, "waiting": self.waiting}, indent=1).encode())

    @property
    def names(self) -> set[str]:
        """Those that must not be pruned."""
        return {*self.waiting, *([self.best.name] if self.best else [])}
