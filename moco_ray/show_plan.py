"""`moco-ray show-plan`: the plan as a person reads it, before anything is started."""

import torch

from moco_ray.data.reading import opened_at, reading
from moco_ray.data.shards import Manifest
from moco_ray.data.survey import Spread, build_manifest
from moco_ray.errors import UserError
from moco_ray.method.encoder import Encoder
from moco_ray.method.schedule import learning_rate
from moco_ray.plan import Plan, Workers
from moco_ray.recipe import Recipe
from moco_ray.words import plural

DATA_TASKS = 2  # at work for a rank, in the figure of memory
NAMES_SHOWN = 4
IMAGENET_ROWS = 1_281_167  # shown when neither data nor rows are given, and said


def describe(
    recipe: Recipe, rows: int | None, workers: Workers, at_step: int | None = None, spread: Spread | None = None
) -> str:
    """The plan as text; with `at_step`, also what a run that resumes there would open. Of a range of workers both ends are shown.

    Raises UserError for what is wrong with recipe, data, workers or step.
    """
    manifest = build_manifest(recipe.data.uri, recipe.data.image_column, spread) if recipe.data.uri else None
    if manifest is not None and rows not in (None, manifest.rows):
        raise UserError(f"--rows {rows} contradicts the data set's {manifest.rows} rows; give one of the two")
    source = recipe.data.uri if manifest else ("--rows" if rows else "ImageNet-1k's count, for no data set is given")
    plan = Plan(recipe, manifest.rows if manifest else rows or IMAGENET_ROWS)
    plan.refuse_world(workers.most)
    worlds = sorted({workers.least or workers.most, workers.most})
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
        ("workers", f"{workers} of at most {plan.groups}; efficiency {_efficiency(plan, worlds)}"),
        ("learning rate", ", ".join(f"step {s}: {learning_rate(plan, s):.3g}" for s in _points(plan))),
        ("", _published(facts, recipe)),
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
    if manifest is not None:
        table.append(_data(manifest, plan))
    for world in worlds:
        of = f"{plural(world, 'worker')}: " if len(worlds) > 1 else ""
        lines = _reading_table(manifest, plan, world) if manifest is not None else []
        if at_step is not None:
            lines += _resume_table(manifest, plan, world, at_step)
        table += [(name, of + text) for name, text in lines]
    warnings = plan.warnings() + list(manifest.warnings if manifest else ())
    lines = [f"{name:<14} {text}" for name, text in table] + [f"warning: {text}" for text in warnings]
    return "\n".join(lines)


def _efficiency(plan: Plan, worlds: list[int]) -> str:
    if len(worlds) == 1:
        return f"{plan.efficiency(worlds[0]):.0%}"
    return ", ".join(f"{plan.efficiency(world):.0%} with {world}" for world in worlds)


def _data(manifest: Manifest, plan: Plan) -> tuple[str, str]:
    """How the data lie."""
    total, chunks = int(manifest.chunk_bytes.sum()), len(manifest.chunk_rows)
    what = {"parquet": "Parquet row groups", "tar": "runs of tar members", "tree": "image files"}[manifest.layout]
    return "data", f"{chunks:,} {what} in {len(manifest.names):,} files, {_bytes(total)}, {_bytes(total / plan.rows)} an image"


def _reading_table(manifest: Manifest, plan: Plan, workers: int) -> list[tuple[str, str]]:
    """What an epoch reads, and the memory that a rank needs for it."""
    found, store = reading(manifest, plan, workers), plan.object_store_bytes(workers, DATA_TASKS)
    return [
        (
            "segments",
            f"{found.segments_per_rank:,} an epoch and rank, of {found.steps_per_segment} steps; each reads "
            f"{found.chunks_per_segment:.4g} pieces, {_bytes(found.bytes_per_segment)}",
        ),
        (
            "reading",
            f"{_bytes(found.bytes_per_step)} a step, {_bytes(found.bytes_per_step * plan.steps_per_epoch)} an epoch: "
            f"{found.amplification:.2f} times the images' own bytes",
        ),
        (
            "memory",
            f"a rank: {_bytes(store)} of Ray's object store with {DATA_TASKS} data tasks at work for it, and "
            f"{_bytes(found.bytes_per_segment)} in each task; all {workers}: {_bytes(workers * store)}",
        ),
    ]


def _resume_table(manifest: Manifest | None, plan: Plan, workers: int, step: int) -> list[tuple[str, str]]:
    if manifest is None:
        raise UserError("--at-step tells which files a resume would open: give --data too")
    if not 0 <= step < plan.total_steps:
        raise UserError(f"--at-step {step}: the run has the steps 0 to {plan.total_steps - 1}")
    lines = []
    for rank in range(workers):
        found = opened_at(manifest, plan, workers, rank, step)
        more = f" and {len(found.files) - NAMES_SHOWN} more" if len(found.files) > NAMES_SHOWN else ""
        names = ", ".join(found.files[:NAMES_SHOWN])
        lines.append((f"at step {step}", f"rank {rank} opens {found.chunks} pieces, {_bytes(found.bytes)}, of {names}{more}"))
    return lines


def _published(facts: dict, recipe: Recipe) -> str:
    if "published_learning_rate" not in facts:
        return f"of {recipe.optimizer.name}, for which MoCo v1 and v2 have no published one"
    return f"of sgd; linear scaling of the published 0.03 at batch 256 would say {facts['published_learning_rate']:.3g}"


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
