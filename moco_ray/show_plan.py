"""`moco-ray show-plan`: the plan as a person reads it, before anything is started."""

import torch

from moco_ray.data.survey import build_manifest
from moco_ray.errors import UserError
from moco_ray.method.encoder import Encoder
from moco_ray.method.schedule import learning_rate
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe

IMAGENET_ROWS = 1_281_167  # shown when neither data nor rows are given, and said


def describe(recipe: Recipe, rows: int | None, workers: int) -> str:
    """The plan as text. Raises UserError for what is wrong with recipe, data or workers."""
    manifest = build_manifest(recipe.data.uri, recipe.data.image_column) if recipe.data.uri else None
    if manifest is not None and rows not in (None, manifest.rows):
        raise UserError(f"--rows {rows} contradicts the data set's {manifest.rows} rows; give one of the two")
    source = recipe.data.uri if manifest else ("--rows" if rows else "ImageNet-1k's count, for no data set is given")
    plan = Plan(recipe, manifest.rows if manifest else rows or IMAGENET_ROWS)
    plan.refuse_world(workers)
    facts, batch = plan.facts(), recipe.batch
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Encoder(recipe.encoder, batch.bn_group_size).parameters())
    table = [
        (
            "recipe",
            f"{facts['recipe_fingerprint']} ({recipe.encoder.backbone}, {recipe.encoder.head} head, {recipe.encoder.precision})",
        ),
        ("rows", f"{plan.rows:,} ({source}); {plan.dropped_rows} left out of each epoch"),
        ("steps", f"{plan.total_steps:,} in all, {plan.steps_per_epoch:,} an epoch, {plan.epochs:.4g} epochs"),
        ("batch", f"{batch.global_batch_size} rows in {plan.groups} BatchNorm groups of {batch.bn_group_size}"),
        ("workers", f"{workers} of at most {plan.groups}; efficiency {plan.efficiency(workers):.0%}"),
        ("learning rate", ", ".join(f"step {s}: {learning_rate(plan, s):.3g}" for s in _points(plan))),
        ("", f"linear scaling of the published 0.03 at batch 256 would say {facts['published_learning_rate']:.3g}"),
        ("queue", f"{recipe.contrast.queue_keys:,} keys, {_bytes(facts['queue_bytes'])}, {_turn(facts)}"),
        (
            "chance loss",
            f"log(K+1) = {plan.chance_loss:.3f}; a healthy loss rises first, while real keys replace noise",
        ),
        ("encoder", f"{parameters / 1e6:.1f} M parameters, twice (query and key)"),
        ("checkpoint", f"about {_bytes(plan.checkpoint_bytes(parameters))}, {recipe.run.keep_checkpoints} kept"),
        (
            "crops",
            f"{_bytes(6 * recipe.augment.image_pixels**2 * batch.global_batch_size)} uint8 a step, both views of all rows",
        ),
    ]
    warnings = plan.warnings() + list(manifest.warnings if manifest else ())
    lines = [f"{name:<14} {text}" for name, text in table] + [f"warning: {text}" for text in warnings]
    return "\n".join(lines)


def _points(plan: Plan) -> list[int]:
    schedule, last = plan.recipe.schedule, plan.total_steps - 1
    milestones = [epoch * plan.steps_per_epoch for epoch in schedule.milestone_epochs]
    return sorted({0, *filter(lambda s: s < last, [schedule.warmup_steps, last // 4, last // 2, *milestones]), last})


def _turn(facts: dict) -> str:
    return f"replaced every {facts['queue_turn_steps']:.4g} steps ({facts['queue_turn_epochs']:.3g} epochs)"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
