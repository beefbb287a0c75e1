"""`moco-ray show-plan --gpus 8:1024`: what a run would be on more GPUs than there are, as a person reads it.

Responsible for the rows, their order and their words. Not responsible for the numbers (scaling.py).
"""

import math

import torch

from moco_ray.cluster_facts import ClusterFacts
from moco_ray.data.reading import reading
from moco_ray.data.survey import Spread, build_manifest
from moco_ray.errors import UserError
from moco_ray.method.encoder import Encoder
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe
from moco_ray.scaling import Scale, predict, recipe_for
from moco_ray.show_plan import IMAGENET_ROWS
from moco_ray.traffic import Load, buckets

MOST_GPUS = 16384
OTHER = "*"  # marks rows of another recipe than the one given
HEAD = ("GPUs", "nodes", "batch", "rate", "images/s", "effic.", "bound by", *"encode crops keys grads signal ckpt input".split(), "store GiB", "store MB/s", "net MB/s", "net", "hours", "money")
LEFT = {"bound by"}


def gpu_counts(words: str) -> list[int]:
    """"8:1024" as 8, 16, .. 1024: the powers of two in the range, and its end; "8" as itself. Raises UserError."""
    least, colon, most = words.partition(":")
    try:
        first, last = int(least), int(most if colon else least)
    except ValueError:
        raise UserError(f"--gpus {words}: give a range, as 8:1024, or one number") from None
    if not 1 <= first <= last <= MOST_GPUS:
        raise UserError(f"--gpus {words}: the fewest come first, at least 1, and at most {MOST_GPUS}")
    powers = [2**power for power in range(last.bit_length()) if first <= 2**power <= last]
    return sorted({*powers, last})


def describe_scale(recipe: Recipe, rows: int | None, gpus: str, facts: ClusterFacts, spread: Spread | None = None) -> str:
    """The table as text, what its columns mean, and where each fact comes from.

    With a data set its rows, and the bytes that are read for an image. Raises UserError.
    """
    counts = gpu_counts(gpus)
    source = "--rows" if rows else "ImageNet-1k's count, for no data set is given"
    if recipe.data.uri:
        manifest = build_manifest(recipe.data.uri, recipe.data.image_column, spread)
        if rows not in (None, manifest.rows):
            raise UserError(f"--rows {rows} contradicts the data set's {manifest.rows} rows; give one of the two")
        rows, source = manifest.rows, recipe.data.uri
        read = reading(manifest, Plan(recipe, rows), 1).bytes_per_step / recipe.batch.global_batch_size
        if "input.bytes_per_image" not in facts.given():
            facts = facts.model_copy(update={"input": facts.input.model_copy(update={"bytes_per_image": read})})
    rows = rows or IMAGENET_ROWS
    plan = Plan(recipe, rows)
    gradients = gradient_bytes(recipe)
    found, refused = [], []
    for count in counts:
        try:
            row = Plan(recipe_for(recipe, count), rows)
            found.append((row, predict(Load(row, gradients), facts, count)))
        except UserError as error:
            refused.append(f"{count} GPUs are left out: {error}")
    lines = [
        "NOTHING HERE WAS MEASURED ON A GPU: arithmetic on the facts below, of which those assumed are yours to replace.",
        *_load_lines(Load(plan, gradients), source),
        "",
        *_table([_cells(row, scale, recipe) for row, scale in found]),
        "",
        *_notes(plan, found),
        *refused,
        "",
        *_fact_lines(facts, bool(recipe.data.uri)),
    ]
    return "\n".join(lines)


def gradient_bytes(recipe: Recipe) -> tuple[int, ...]:
    """Of each parameter of the query encoder, in its order."""
    width = 8 if recipe.encoder.precision == "float64" else 4
    with torch.device("meta"):
        return tuple(p.numel() * width for p in Encoder(recipe.encoder, recipe.batch.bn_group_size).parameters())


def _load_lines(load: Load, source: str) -> list[str]:
    plan, recipe = load.plan, load.plan.recipe
    sizes, times = buckets(load.gradients), " twice (symmetric)" if load.directions == 2 else ""
    domain = recipe.batch.shuffle_domain_groups or plan.groups
    return [
        f"recipe     {recipe.encoder.backbone}, {recipe.encoder.head} head, {recipe.augment.image_pixels} pixels; batch {recipe.batch.global_batch_size} "
        f"in {plan.groups} BatchNorm groups; {plan.rows:,} rows ({source}), {plan.epochs:.4g} epochs",
        f"a step     all-reduces {load.reduced_bytes / 1e6:.4g} MB of gradients in {len(sizes)} buckets, the last of {sizes[-1] * load.gradient_wire / 1e6:.3g} MB; "
        f"exchanges {load.crop_bytes / 1e6:.3g} MB of crop a row within {domain} groups, and gathers {load.key_bytes} bytes of key a row{times}",
    ]


def _cells(plan: Plan, scale: Scale, recipe: Recipe) -> list[str]:
    other = OTHER if plan.recipe != recipe else ""
    shares = [f"{part / scale.step_seconds:.1%}" if part else "-" for part in scale.parts]
    return [
        f"{scale.gpus}", f"{scale.nodes}" + (f"+{scale.data_nodes}" if scale.data_nodes else ""),
        f"{plan.recipe.batch.global_batch_size}{other}", f"{plan.recipe.optimizer.learning_rate:.3g}",
        f"{scale.images_per_second:,.0f}", f"{scale.efficiency:.0%}", scale.bound, *shares,
        f"{scale.store_bytes / 2**30:.3g}", f"{scale.store_bytes_per_second / 1e6:,.0f}",
        f"{scale.network_bytes_per_second / 1e6:,.0f}", f"{scale.network_share:.0%}",
        *((f"{scale.hours:,.1f}", f"{scale.money:,.0f}") if math.isfinite(scale.hours) else ("never", "-")),
    ]  # fmt: skip


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) if name in LEFT else cell.rjust(w) for name, cell, w in zip(HEAD, row, widths, strict=True)).rstrip()
        for row in [list(HEAD), *rows]
    ]


def _notes(plan: Plan, found: list[tuple[Plan, Scale]]) -> list[str]:
    notes = [
        "effic. is the rate over as many times one GPU's; encode .. input are shares of a step, of what nothing hides (crops: exchange of uint8 crops;",
        "keys: their gather; grads: all-reduce of gradients; signal: small collectives; ckpt: the copy; input: the wait for crops). Of a GPU node:",
        "store: Ray's object store, held and brought by the second; net: received over its network. money: in the currency of price.*, for the run.",
    ]
    others = [row for row, scale in found if row.recipe != plan.recipe]
    if others:
        notes.append(
            f"{OTHER} ANOTHER RECIPE, whose accuracy nobody measured: a BatchNorm group of {plan.recipe.batch.bn_group_size} rows for each GPU, as this recipe has "
            f"{plan.groups}, with its learning rate scaled linearly."
        )
        keys = plan.recipe.contrast.queue_keys
        swamped = [str(scale.gpus) for row, scale in found if row in others and row.keys_per_step > keys / 8]
        if swamped:
            notes.append(f"At {', '.join(swamped)} GPUs the queue of {keys:,} keys is replaced every few steps: hardly a dictionary any more.")
    late = [str(scale.gpus) for _, scale in found if scale.saves_skipped]
    if late:
        notes.append(f"At {', '.join(late)} GPUs saving a checkpoint takes longer than the interval between two: some are skipped.")
    if any(not math.isfinite(scale.hours) for _, scale in found):
        notes.append("never: restarts cost more time than there is between them.")
    return notes


def _fact_lines(facts: ClusterFacts, of_data: bool) -> list[str]:
    sources = facts.sources()
    if of_data and "input.bytes_per_image" not in facts.given():
        sources["input.bytes_per_image"] = (facts.input.bytes_per_image, "of the data set, with what is read twice")
    lines = [f"{name:<32} {value:<12.6g} {source}" for name, (value, source) in sources.items()]
    return ["facts (--cluster FILE, --fact KEY=VALUE; infra/cluster_facts.toml is a file to copy):", *lines]
