"""The plan: every number that follows from the recipe, the data's rows and the world size.

The only place where numbers are derived. Pure: no torch, no files, no processes.
"""

import math
from dataclasses import dataclass

from moco_ray.errors import UserError
from moco_ray.recipe import Recipe

WINDOW_ROWS = 512  # rows of one BN group's stream that are permuted among themselves


def groups_of_rank(groups: int, world: int, rank: int) -> range:
    """The contiguous run of BN groups that `rank` owns; the first `groups % world` ranks own one more."""
    base, extra = divmod(groups, world)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


@dataclass(frozen=True)
class Plan:
    """What a recipe means on a data set of `rows` rows. Nothing here depends on the world size."""

    recipe: Recipe
    rows: int

    def __post_init__(self):
        if self.rows < self.recipe.batch.global_batch_size:
            raise UserError(
                f"the data set has {self.rows} rows, fewer than batch.global_batch_size "
                f"{self.recipe.batch.global_batch_size}; add images or make the batch smaller"
            )
        if self.recipe.schedule.warmup_steps >= self.total_steps:
            raise UserError(
                f"schedule.warmup_steps {self.recipe.schedule.warmup_steps} is not shorter than the run "
                f"({self.total_steps} steps); shorten the warm-up or lengthen the run"
            )

    @property
    def groups(self) -> int:
        return self.recipe.batch.groups

    @property
    def steps_per_epoch(self) -> int:
        return self.rows // self.recipe.batch.global_batch_size

    @property
    def dropped_rows(self) -> int:
        """Rows that an epoch leaves out, R mod B; others every epoch."""
        return self.rows % self.recipe.batch.global_batch_size

    @property
    def total_steps(self) -> int:
        schedule = self.recipe.schedule
        return schedule.steps or schedule.epochs * self.steps_per_epoch

    @property
    def epochs(self) -> float:
        return self.total_steps / self.steps_per_epoch

    @property
    def window_steps(self) -> int:
        """Steps whose rows (of one group) are permuted among themselves; see data/order.py."""
        batch = self.recipe.batch
        return max(1, min(WINDOW_ROWS // batch.bn_group_size, 4096 // batch.global_batch_size))

    @property
    def chance_loss(self) -> float:
        """log(K+1): the loss of a network that knows nothing."""
        return math.log(self.recipe.contrast.queue_keys + 1)

    @property
    def keys_per_step(self) -> int:
        return self.recipe.batch.global_batch_size * (2 if self.recipe.contrast.symmetric else 1)

    def refuse_world(self, world: int) -> None:
        """Raise UserError if there are more workers than BN groups."""
        if world < 1:
            raise UserError(f"--workers {world}: at least one worker is needed")
        if world > self.groups:
            raise UserError(
                f"--workers {world}: more workers than the {self.groups} BatchNorm groups (batch.global_batch_size / "
                f"batch.bn_group_size); use at most {self.groups} workers"
            )

    def efficiency(self, world: int) -> float:
        """Share of the workers' time that is used when groups cannot be dealt out evenly."""
        return self.groups / (world * math.ceil(self.groups / world))
