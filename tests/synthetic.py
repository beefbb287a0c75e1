"""Small recipes and batches made of numbers: all that the loop needs, without images or Ray."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from moco_ray.data.batch import Batch
from moco_ray.learner import Learner
from moco_ray.method.batchnorm import GroupedBatchNorm2d
from moco_ray.method.encoder import working_dtype
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.train import Outputs, rows_of, train

PLAIN = {  # an augmentation that only normalises
    "jitter": [0, 0, 0, 0], "grayscale_probability": 0, "blur_probability": 0, "flip_probability": 0,
}  # fmt: skip


def recipe(**changes: dict[str, Any]) -> Recipe:
    """G = 8 groups of 4 rows, float64, 16 pixels, a queue that the batch does not divide; 20 steps."""
    values: dict[str, dict[str, Any]] = {
        "encoder": {
            "backbone": "resnet10", "stem": "small_stride2", "feature_dim": 16, "precision": "float64",
        },
        "contrast": {"queue_keys": 100, "key_momentum": 0.99},
        "batch": {"global_batch_size": 32, "bn_group_size": 4},
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"steps": 20},
        "augment": {"image_pixels": 16},
        "run": {"log_every_steps": 1, "checkpoint_every_steps": 1000, "memory_format": "contiguous"},
    }  # fmt: skip
    for section, table in changes.items():
        values.setdefault(section, {}).update(table)
    return Recipe.parse(values)


def plan(recipe_: Recipe, rows: int = 300) -> Plan:
    return Plan(recipe_, rows)  # 9 steps an epoch: 20 steps cross two epoch ends


def batches(plan: Plan, ranks: Ranks, start: int = 0) -> Iterator[Batch]:
    """This rank's rows of random images; a row depends on (step, row) alone."""
    own, total = rows_of(plan, ranks.world, ranks.rank), plan.recipe.batch.global_batch_size
    pixels = plan.recipe.augment.image_pixels
    for step in range(start, plan.total_steps):
        crops = np.random.default_rng([99, step]).integers(0, 256, (total, 2, pixels, pixels, 3), dtype=np.uint8)
        epoch, in_epoch = divmod(step, plan.steps_per_epoch)
        positions = torch.arange(own.start, own.stop) + in_epoch * total
        yield Batch(epoch, torch.from_numpy(crops[own.start : own.stop]), positions, positions)


class Log:
    """Outputs that keep what the loop hands out."""

    def __init__(self):
        self.entries: list[dict] = []
        self.bad: list = []
        self.states: dict[int, dict] = {}

    def outputs(self, evaluate=lambda learner: {}) -> Outputs:
        return Outputs(self._record, self._save, evaluate)

    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.entries]

    def _record(self, entry, bad):
        self.entries.append(entry)
        self.bad += bad

    def _save(self, learner):
        self.states[learner.step] = copy_state(learner.state_dict())


def copy_state(state: Any) -> Any:
    """A deep copy, so that later steps do not change it."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: copy_state(value) for key, value in state.items()}
    return [copy_state(value) for value in state] if isinstance(state, list) else state


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """A nested state as {path: leaf}."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    if items is None:
        return {prefix: state}
    return {name: leaf for key, value in items for name, leaf in flat(value, f"{prefix}/{key}").items()}


def largest_difference(a: Any, b: Any) -> float:
    """Over all tensors of two states with the same leaves; plain values must be equal."""
    a, b = flat(a), flat(b)
    assert a.keys() == b.keys()
    worst = 0.0
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            worst = max(worst, float((value.double() - b[name].double()).abs().max()))
        else:
            assert value == b[name], (name, value, b[name])
    return worst


def identical(a: Any, b: Any) -> bool:
    """Whether two states agree in every bit."""
    a, b = flat(a), flat(b)
    return a.keys() == b.keys() and all(
        torch.equal(v, b[n]) if isinstance(v, torch.Tensor) else v == b[n] for n, v in a.items()
    )


class SmallEncoder(nn.Module):
    """Two strided convolutions with grouped BatchNorm and a linear head: a step costs milliseconds."""

    def __init__(self, group_rows: int, feature_dim: int, width: int = 0):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False), GroupedBatchNorm2d(8, group_rows), nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, bias=False), GroupedBatchNorm2d(12, group_rows), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        # `width` 1024 makes gradients of 8 MB: several of DDP's buckets (1 MB, then 25 MB), so their order matters.
        sizes = [12, *([width] * 3 if width else [])]
        wide = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.head = nn.Sequential(*wide, nn.Linear(sizes[-1], feature_dim))

    def forward(self, x):
        return self.head(self.backbone(x))


def wide_learner(recipe_: Recipe) -> Learner:
    """Like `small_learner`, with enough parameters for several DDP buckets."""
    return small_learner(recipe_, width=1024)


def small_learner(recipe_: Recipe, width: int = 0) -> Learner:
    """The recipe's learner with a small network in place of the ResNet."""

    def build(settings, group_rows, seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = SmallEncoder(group_rows, settings.feature_dim, width)
        return network.to(working_dtype(settings))

    with mock.patch("moco_ray.learner.build_encoder", build):
        return Learner.new(recipe_)


def run(
    ranks: Ranks, recipe_: Recipe, state: dict | None = None, until: int | None = None, new=small_learner
) -> tuple[Log, Learner]:
    """Train as `ranks` from the beginning or from `state`, to the end or to `until` completed steps."""
    torch.set_num_threads(1)
    log, plan_, learner = Log(), plan(recipe_), new(recipe_)
    if state is not None:
        learner.load_state_dict(state)
    rows = batches(plan_, ranks, learner.step)
    if until is not None:
        rows = (batch for _, batch in zip(range(learner.step, until), rows, strict=False))
    try:
        train(learner, rows, plan_, ranks, log.outputs())
    except StopIteration:
        assert until is not None and learner.step == until
    return log, learner
