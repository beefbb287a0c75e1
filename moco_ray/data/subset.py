"""Some rows of a data set, and the order of an epoch over them alone.

Responsible for a share of each class (labelled rows for fine-tuning) and for its order, which is that of order.py over
the chosen rows of each chunk. Not responsible for reading labels (labels.py) nor rows (segment.py).
A task reads the chunks that hold its rows: of row groups of 128, one in a hundred rows costs nearly as many bytes an epoch
as all of them. A tree, and a set packed from the subset, cost what the subset holds.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moco_ray.data.order import EpochOrder
from moco_ray.data.shards import Manifest
from moco_ray.errors import UserError
from moco_ray.plan import Plan

_TAG = 0x5B  # keeps the choice of rows apart from other draws of the seed


@dataclass(frozen=True, eq=False)
class Subset:
    """Rows of a manifest. Two are equal if they hold the same."""

    rows: np.ndarray  # S int64, rising

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the row numbers as 16 hex digits."""
        return hashlib.sha256(self.rows.astype("<i8").tobytes()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subset) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)


def share_of_each_class(labels: np.ndarray, percent: float, seed: int) -> Subset:
    """`percent` of the rows of each class (labels N int64), drawn from (seed, class): to the nearest row, at least one.

    A class has the share that it has in the set; a class more or less leaves the draws of the others alone.
    Raises UserError for a share that is none.
    """
    if not 0.0 < percent <= 100.0:
        raise UserError(f"--labels {percent:g} must be a percentage above 0 and at most 100")
    rows = []
    for label in np.unique(labels).tolist():
        own = np.flatnonzero(labels == label)
        wanted = max(1, int(len(own) * percent / 100 + 0.5))
        rows.append(np.random.default_rng([_TAG, seed, label]).choice(own, wanted, replace=False))
    return Subset(np.sort(np.concatenate(rows)).astype(np.int64))


class SubsetOrder(EpochOrder):
    """The rows of every step of one epoch of a subset; row numbers are the manifest's."""

    def __init__(self, manifest: Manifest, subset: Subset, plan: Plan, seed: int, epoch: int):
        """`plan` is made from the subset's rows. Raises ValueError if it is not."""
        self._rows = subset.rows
        chunks, _ = manifest.locate(subset.rows)
        super().__init__(np.bincount(chunks, minlength=len(manifest.chunk_rows)), plan, seed, epoch)

    def _rows_at(self, laid: np.ndarray) -> np.ndarray:
        return self._rows[super()._rows_at(laid)]
