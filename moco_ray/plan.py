"""The plan: every number that follows from the recipe, the data's rows and the world size.

The only place where numbers are derived. Pure: no torch, no files, no processes.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from moco_ray.errors import UserError
from moco_ray.recipe import Recipe

WINDOW_ROWS = 512  # rows of one BN group's stream that are permuted among themselves


def groups_of_rank(groups: int, world: int, rank: int) -> range:
    """The contiguous run of BN groups that `rank` owns; the first `groups % world` ranks own one more."""
    base, extra = divmod(groups, world)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def rows_of(plan: "Plan", world: int, rank: int) -> range:
    """Rows of the batch that a rank owns."""
    groups, n = groups_of_rank(plan.groups, world, rank), plan.recipe.batch.bn_group_size
    return range(groups.start * n, groups.stop * n)


def passes(plan: "Plan", rows: int) -> list[slice]:
    """A rank's rows cut into forward passes of whole BN groups."""
    size = (plan.recipe.run.groups_per_forward or plan.groups) * plan.recipe.batch.bn_group_size
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class Workers(NamedTuple):
    """How many Ray Train workers may carry a run."""

    most: int
    least: int = 0  # 0: exactly `most`, for which Ray waits

    @classmethod
    def of(cls, words: str) -> "Workers":
        """"4" for four, "2:16" for as many of two to sixteen as there is room for. Raises UserError."""
        least, colon, most = words.partition(":")
        try:
            found = cls(int(most), int(least)) if colon else cls(int(least))
        except ValueError:
            raise UserError(f"--workers {words}: give a number, as 4, or the fewest and the most, as 2:16") from None
        if found.most < 1 or (colon and not 1 <= found.least <= found.most):
            raise UserError(f"--workers {words}: at least one worker is needed, and the fewest come first")
        return found

    @property
    def elastic(self) -> bool:
        return self.least > 0

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)


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

    def facts(self) -> dict[str, float | int | str]:
        """The derived numbers, for the run folder and for show-plan."""
        recipe = self.recipe
        return {
            "recipe_fingerprint": recipe.fingerprint(),
            "rows": self.rows,
            "steps_per_epoch": self.steps_per_epoch,
            "dropped_rows_per_epoch": self.dropped_rows,
            "total_steps": self.total_steps,
            "epochs": self.epochs,
            "bn_groups": self.groups,
            "window_steps": self.window_steps,
            "chance_loss": self.chance_loss,
            "queue_turn_steps": recipe.contrast.queue_keys / self.keys_per_step,
            "queue_turn_epochs": recipe.contrast.queue_keys / self.keys_per_step / self.steps_per_epoch,
            "queue_bytes": recipe.contrast.queue_keys
            * (recipe.encoder.feature_dim * (8 if recipe.encoder.precision == "float64" else 4) + 8),
            **({"published_learning_rate": 0.03 * recipe.batch.global_batch_size / 256} if recipe.optimizer.name == "sgd" else {}),
        }

    def object_store_bytes(self, world: int, tasks_in_flight: int) -> int:
        """What the crops of one rank may take in Ray's object store, with so many of its data tasks at work.

        Ten steps a task and four more, and six steps a task and four more where one chain of tasks follows another. Measured
        with 1, 2, 3 and 4 tasks in flight whose segments are 16 steps long: 9, 19, 22 and 30 steps, for any length of
        the data set.
        """
        rows = math.ceil(self.groups / world) * self.recipe.batch.bn_group_size
        return (16 * tasks_in_flight + 8) * rows * 6 * self.recipe.augment.image_pixels**2

    def checkpoint_bytes(self, encoder_parameters: int) -> int:
        """Size of a checkpoint: both encoders, one moment of the gradient or AdamW's two, and the queue."""
        width, copies = 8 if self.recipe.encoder.precision == "float64" else 4, 4 if self.recipe.optimizer.name == "adamw" else 3
        return copies * encoder_parameters * width + int(self.facts()["queue_bytes"])

    def warnings(self) -> list[str]:
        """What a user should know before the run, one line each."""
        return list(self.concerns().values())

    def concerns(self) -> dict[str, str]:
        """The same by what it is about."""
        recipe, facts, said = self.recipe, self.facts(), {}
        keys, turn = recipe.contrast.queue_keys, facts["queue_turn_epochs"]
        if keys >= self.rows:
            said["queue"] = (
                f"contrast.queue_keys {keys} is not smaller than the data set's {self.rows} rows: an image's own older keys "
                "are among its negatives; a queue below a tenth of the rows is usual"
            )
        elif turn > 0.5:
            said["queue"] = f"the queue turns over once in {turn:.2f} epochs: many of its keys are of the images just seen"
        if self.total_steps < 2 * facts["queue_turn_steps"]:
            said["queue_fill"] = (
                f"the run's {self.total_steps} steps fill the queue {self.total_steps / facts['queue_turn_steps']:.2f} times; "
                "loss and accuracy mean little before it is full"
            )
        if self.groups == 1:
            said["groups"] = "one BatchNorm group holds the whole batch: batch norm leaks, whatever the shuffle"
        elif self.groups < 8:
            said["groups"] = (
                f"{self.groups} BatchNorm groups: statistics of a query's and its key's group correlate by 1/{self.groups}; the "
                "published set-up has 8 groups"
            )
        if recipe.contrast.symmetric:
            said["symmetric"] = f"the symmetric form enqueues {self.keys_per_step} keys a step, which halves the age of the queue's keys"
        if recipe.contrast.key_momentum < 0.99:
            said["key_momentum"] = (
                f"contrast.key_momentum {recipe.contrast.key_momentum} lets queued keys go stale: the loss may look good while "
                "the features stay poor; 0.999 is the published value, 0.99 suits small data sets"
            )
        if recipe.optimizer.name == "lars" and recipe.optimizer.decay_norm_and_bias:
            said["optimizer"] = (
                "optimizer.name lars scales each tensor's rate by its own norm, which for biases is 0 at first; published set-ups leave norms "
                "and biases out: optimizer.decay_norm_and_bias=false"
            )
        if self.dropped_rows:
            said["dropped_rows"] = f"{self.dropped_rows} rows are left out of each epoch (rows mod global batch), others every epoch"
        return said
