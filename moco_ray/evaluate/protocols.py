"""What is trained with labels, and how: the published linear classifier, and fine-tuning.

Responsible for the numbers of each protocol and for the recipe that carries them. Not responsible for training (probe.py).

A protocol is a recipe of its own, derived from the backbone's: its batch, optimizer, schedule, crops, seed, and the label set
as its data. So the order of the rows, the crops and the rate are the trainer's own, and do not depend on the number of workers.
In one thing this differs from the released code: an epoch drops the R mod B rows that fill no batch (others every epoch), where
the released loader makes a smaller last batch of them.
"""

from dataclasses import dataclass
from typing import Any

from moco_ray.errors import UserError
from moco_ray.recipe import Augment, Batch, Contrast, Data, Encoder, Optimizer, Recipe, Schedule

LARGEST_GROUP_ROWS = 32  # of BatchNorm in fine-tuning, and the unit that is dealt out to workers
LABEL_PERCENT = (1, 10, 100)


@dataclass(frozen=True)
class Choices:
    """What a user may choose otherwise; None: the protocol's own."""

    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    image_pixels: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Protocol:
    """A way to judge a backbone by training on labels."""

    name: str  # also of the files of its result
    recipe: Recipe
    head_factor: float  # the classifier's learning rate, in terms of the recipe's
    tuned: bool  # whether the backbone is trained too
    label_percent: int
    source: str  # where the numbers come from, and what is ours

    @property
    def classifier_rate(self) -> float:
        """At the start."""
        return self.recipe.optimizer.learning_rate * self.head_factor

    def facts(self) -> dict[str, Any]:
        """For the result: JSON."""
        recipe = self.recipe
        return {
            "name": self.name,
            "source": self.source,
            "epochs": recipe.schedule.epochs,
            "global_batch_size": recipe.batch.global_batch_size,
            "optimizer": {**recipe.optimizer.model_dump(), "name": "SGD", "classifier_learning_rate": self.classifier_rate},
            "schedule": recipe.schedule.shape,
            "milestone_epochs": list(recipe.schedule.milestone_epochs),
            "training_view": f"RandomResizedCrop({recipe.augment.image_pixels}, scale {list(recipe.augment.crop_scale)}) and flip",
            "test_view": f"shorter side to {recipe.evaluation.resize_pixels}, centre {recipe.augment.image_pixels}",
            "backbone": "trained, BatchNorm over groups of rows" if self.tuned else "frozen, evaluation mode",
            "bn_group_size": recipe.batch.bn_group_size if self.tuned else None,
            "label_percent": self.label_percent,
            "seed": recipe.run.seed,
            "recipe_fingerprint": recipe.fingerprint(),
            "recipe": recipe.model_dump(mode="json"),
        }


def linear(base: Recipe, choices: Choices) -> Protocol:
    """He et al. 2019, section 4.1: frozen features, one linear layer, SGD of rate 30 without weight decay, 100 epochs of
    batches of 256, a tenth of the rate from epoch 60 on and from 80 on.

    With other epochs the two steps stay at 60 % and 80 % of them. `base` is the backbone's recipe with labelled sets.
    https://github.com/facebookresearch/moco/blob/010242b77d0ccc6a9b094ad95af127b99f72fe89/main_lincls.py
    """
    epochs = 100 if choices.epochs is None else choices.epochs
    steps = sorted({max(1, round(share * epochs)) for share in (0.6, 0.8)})
    optimizer = Optimizer(learning_rate=_rate(choices, 30.0), sgd_momentum=0.9, weight_decay=0.0)
    schedule = _checked_epochs(epochs, shape="multistep", milestone_epochs=tuple(steps), milestone_factor=0.1)
    return Protocol("linear", _recipe(base, choices, optimizer, schedule), 1.0, False, 100, "He et al. 2019 (MoCo), main_lincls.py")


def finetune(base: Recipe, choices: Choices, percent: int) -> Protocol:
    """The whole network trained on a share of the labels of each class. MoCo publishes no such protocol; this is the command that
    Barlow Twins publishes for 1 % of the labels: 20 epochs of batches of 256, half a cosine, SGD of momentum 0.9, rate 0.002 and
    250 times that for the classifier, no weight decay. For other shares the same: papers choose rates for each, so find your own
    (`--learning-rate` moves both).
    https://github.com/facebookresearch/barlowtwins/blob/004dce3eb33ce3d0bb6a1fd80a5ee290b98e4a36/README.md

    Ours: BatchNorm normalises groups of up to 32 rows, so that the number of workers changes nothing; the cosine moves every step.
    """
    if percent not in LABEL_PERCENT:
        raise UserError(f"--labels {percent} must be 1, 10 or 100 (per cent of the labels of each class)")
    optimizer = Optimizer(learning_rate=_rate(choices, 0.002), sgd_momentum=0.9, weight_decay=0.0)
    schedule = _checked_epochs(20 if choices.epochs is None else choices.epochs, shape="cosine")
    source = "Zbontar et al. 2021 (Barlow Twins), evaluate.py with 1 % of the labels"
    return Protocol(f"finetune-{percent}", _recipe(base, choices, optimizer, schedule), 250.0, True, percent, source)


def group_rows(global_batch_size: int) -> int:
    """The largest divisor of a batch up to 32 that makes two groups at least. Raises UserError if there is none."""
    for rows in range(min(LARGEST_GROUP_ROWS, global_batch_size // 2), 1, -1):
        if global_batch_size % rows == 0:
            return rows
    raise UserError(f"--batch-size {global_batch_size} has no divisor to deal it out by; choose an even number of at least 4, as 256")


def _recipe(base: Recipe, choices: Choices, optimizer: Optimizer, schedule: Schedule) -> Recipe:
    """What the backbone's recipe says of images and labels stays; all else is the protocol's."""
    size = 256 if choices.batch_size is None else choices.batch_size
    pixels, resize = base.augment.image_pixels, base.evaluation.resize_pixels
    if choices.image_pixels is not None:
        if choices.image_pixels < 8:
            raise UserError(f"--image-pixels {choices.image_pixels} must be at least 8")
        pixels, resize = choices.image_pixels, round(choices.image_pixels * 256 / 224)
    augment = Augment(
        image_pixels=pixels, crop_scale=(0.08, 1.0), jitter=(0.0, 0.0, 0.0, 0.0), jitter_probability=0.0, grayscale_probability=0.0,
        blur_probability=0.0, flip_probability=0.5, mean=base.augment.mean, std=base.augment.std,
    )  # fmt: skip
    return Recipe(
        encoder=Encoder(backbone=base.encoder.backbone, stem=base.encoder.stem),
        contrast=Contrast(),
        batch=Batch(global_batch_size=size, bn_group_size=group_rows(size)),
        optimizer=optimizer,
        schedule=schedule,
        augment=augment,
        data=Data(**{**base.data.model_dump(), "uri": base.evaluation.bank_uri}),
        evaluation=base.evaluation.model_copy(update={"resize_pixels": resize, "every_epochs": 0}),
        run=base.run.model_copy(update={"seed": choices.seed}),
    )


def _checked_epochs(epochs: int, **rest: Any) -> Schedule:
    if epochs < 1:
        raise UserError(f"--epochs {epochs} must be at least 1")
    return Schedule(epochs=epochs, **rest)


def _rate(choices: Choices, published: float) -> float:
    rate = published if choices.learning_rate is None else choices.learning_rate
    if not 0.0 < rate < float("inf"):
        raise UserError(f"--learning-rate {rate} must be above 0 and finite")
    return rate
