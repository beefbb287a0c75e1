"""`moco-ray bench-input URI`: how fast this machine makes crops of a data set, and which stage holds it back.

Responsible for measuring the whole plane (Ray Data, as training uses it) and each of its stages apart, on the rows that
a run would read first, and for saying what a faster trainer would need. Nothing of the method is run.
"""

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from moco_ray.data.augment import colour_stage
from moco_ray.data.decode import CROP_DRAWS, BadImage, decode, two_crops
from moco_ray.data.draws import CROP, uniforms
from moco_ray.data.order import EpochOrder
from moco_ray.data.segment import read_rows
from moco_ray.data.shards import Manifest
from moco_ray.data.stream import Shape, batches, in_order, tasks_of_a_rank
from moco_ray.data.survey import build_manifest
from moco_ray.errors import UserError
from moco_ray.placement import DataPlace
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe
from moco_ray.session import lazily_spread, ray_session

SAMPLE_ROWS = 1024  # that the stages are measured on, each by itself
REPEATS = 3  # of each stage; the fastest counts, for other work on the machine only slows down
TRANSPORT_BYTES, LEAST_STEPS, MOST_STEPS = 2 << 30, 32, 512


class Stage(NamedTuple):
    """One stage alone, without the others."""

    name: str
    where: str
    milliseconds: float  # an image, both views

    @property
    def rate(self) -> float:
        return 1000 / self.milliseconds


def bench_input(recipe: Recipe, seconds: float, target_rate: float, debug: bool = False) -> dict[str, Any]:
    """Measure; the result is plain values for `as_text` and for a file. Raises UserError for what is wrong with the data."""
    with lazily_spread(1, debug) as spread:
        manifest = build_manifest(recipe.data.uri, recipe.data.image_column, spread)
        plan = Plan(recipe, manifest.rows)
        encoded, fetched_seconds = _fetch(manifest, plan)
        images, bad = _decodable(encoded, recipe)
        stages = [
            Stage("fetch", "one data task", 1000 * fetched_seconds / len(encoded)),
            *_stages_of_a_core(images, recipe),
            _colour(recipe),
        ]
        with ray_session(1, debug):
            stages.append(_transport(recipe))
            plane = _plane(manifest, plan, seconds)
    return {
        "data": recipe.data.uri,
        "layout": manifest.layout,
        "rows": manifest.rows,
        "mean_image_bytes": sum(map(len, encoded)) / len(encoded),
        "sampled_images": len(encoded),
        "bad_images": bad,
        "image_pixels": recipe.augment.image_pixels,
        "cores": len(os.sched_getaffinity(0)),
        "stages": {stage.name: {**stage._asdict(), "images_per_second": stage.rate} for stage in stages},
        "plane": plane,
        "target_images_per_second": target_rate,
    }


def as_text(result: dict[str, Any]) -> str:
    """The table, the bottleneck, and what a trainer of `target_images_per_second` would need."""
    stages, plane, target = result["stages"], result["plane"], result["target_images_per_second"]
    lines = [
        f"{result['data']}: {result['rows']:,} images in {result['layout']} layout, {result['mean_image_bytes'] / 1000:.1f} kB each; "
        f"two crops of {result['image_pixels']} pixels",
        f"{'stage':<10} {'ms an image':>12} {'images/s':>10}  measured on",
    ]
    lines += [f"{n:<10} {s['milliseconds']:>12.3f} {s['images_per_second']:>10,.0f}  {s['where']}" for n, s in stages.items()]
    own = stages["decode"]["milliseconds"] + stages["crop"]["milliseconds"]
    lines += [
        f"{'plane':<10} {1000 / plane['images_per_second']:>12.3f} {plane['images_per_second']:>10,.0f}  Ray Data, {plane['images']:,} images after the "
        f"first step, {result['cores']} cores",
        f"the plane reaches {plane['images_per_second'] * own / 1000 / result['cores']:.0%} of what {result['cores']} cores could decode and crop",
    ]
    task = {name: stages[name]["milliseconds"] for name in ("fetch", "decode", "crop")}
    worst = max(task, key=task.get)
    lines.append(f"a data task spends most on {worst}: {task[worst] / sum(task.values()):.0%} of its time if nothing overlaps")
    lines.append(
        f"for {target:,.0f} images/s: {np.ceil(target * own / 1000):.0f} cores like these for decode and crop, and "
        f"{target * result['mean_image_bytes'] / 1e6:,.0f} MB/s from the storage"
    )
    if result["bad_images"]:
        lines.append(f"warning: {result['bad_images']} of {result['sampled_images']} images could not be decoded")
    return "\n".join(lines)


def write_json(result: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); name a file in a folder that exists") from error


def _fetch(manifest: Manifest, plan: Plan) -> tuple[list[bytes], float]:
    """The encoded images that a run reads first, and the seconds that one task takes to read them."""
    order = EpochOrder(manifest.chunk_rows, plan, plan.recipe.run.seed, 0)
    rows = np.concatenate([order.window_rows(group, 0) for group in range(plan.groups)])[:SAMPLE_ROWS]
    began = time.perf_counter()
    found = read_rows(manifest, rows)  # once: a second time it may come from memory
    return list(found.values()), time.perf_counter() - began


def _decodable(encoded: list[bytes], recipe: Recipe) -> tuple[list[bytes], int]:
    """Images that can be decoded, and the number of the others."""
    good = []
    for image in encoded:
        try:
            decode(image, recipe.data.max_image_pixels)
        except BadImage:
            continue
        good.append(image)
    if not good:
        raise UserError(f"none of the first {len(encoded)} images of {recipe.data.uri} can be decoded; see README on images")
    return good, len(encoded) - len(good)


def _stages_of_a_core(images: list[bytes], recipe: Recipe) -> list[Stage]:
    pixels = recipe.data.max_image_pixels
    decoded = [decode(image, pixels) for image in images[:256]]  # some at a time: photos are large
    positions = np.arange(len(decoded))

    def crop() -> None:
        views = [uniforms(recipe.run.seed, 0, positions, view, CROP, CROP_DRAWS) for view in (0, 1)]
        for image, draws in zip(decoded, np.stack(views, axis=1), strict=True):
            two_crops(image, draws, recipe.augment)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a data task of one CPU
    try:
        each_decode = _cpu_seconds(lambda: [decode(image, pixels) for image in images]) / len(images)
        each_crop = _cpu_seconds(crop) / len(decoded)
    finally:
        torch.set_num_threads(threads)
    return [Stage("decode", "one core, CPU time", 1000 * each_decode), Stage("crop", "one core, CPU time", 1000 * each_crop)]


def _cpu_seconds(work: Callable[[], Any]) -> float:
    """CPU time of this thread: other work on the machine does not count."""
    times = []
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


def _colour(recipe: Recipe) -> Stage:
    """Both views' colour stage, on the device that would train."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = recipe.batch.bn_group_size
    crops = torch.randint(0, 256, (rows, *[recipe.augment.image_pixels] * 2, 3), dtype=torch.uint8, device=device)
    times = []
    for repeat in range(REPEATS + 1):  # the first also loads kernels
        began = time.perf_counter()
        for view in (0, 1):
            colour_stage(crops, np.arange(rows), view, recipe.run.seed, repeat, recipe.augment, torch.float32).sum().item()
        times.append(time.perf_counter() - began)
    name = "GPU" if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return Stage("colour", f"{name}, in the trainer", 1000 * min(times[1:]) / rows)


def _blank_steps(rows: int, pixels: int, steps: int, task: int):
    for _ in range(steps):
        yield {"crops": np.full((rows, 2, pixels, pixels, 3), task % 256, np.uint8)}


def _transport(recipe: Recipe) -> Stage:
    """Crops that cost nothing to make, through Ray Data as training has them."""
    rows, pixels = recipe.batch.global_batch_size, recipe.augment.image_pixels
    steps = max(1, min(8, (256 << 20) // (rows * 6 * pixels**2)))
    wanted = min(max(TRANSPORT_BYTES // (rows * 6 * pixels**2), LEAST_STEPS), MOST_STEPS)
    tasks = max(2, wanted // steps)
    shape = Shape(rows, 6 * pixels**2, *tasks_of_a_rank(len(os.sched_getaffinity(0)), 1, is_local=True))
    count, began = 0, 0.0
    for columns in in_order(partial(_blank_steps, rows, pixels, steps), tasks, lambda: shape):
        if not count:
            began = time.perf_counter()
        count += len(columns["crops"])
    return Stage("transport", "Ray Data, object store", 1000 * (time.perf_counter() - began) / max(count - rows, 1))


def _plane(manifest: Manifest, plan: Plan, seconds: float) -> dict[str, Any]:
    """The rate of `stream.batches` for one rank that takes what it gets, after its first step."""
    count, passed = 0, 0.0
    stream = batches(manifest, plan.recipe, plan, 1, 0, 0, lambda: DataPlace(len(os.sched_getaffinity(0))), head_start=False)
    next(stream)
    began = time.perf_counter()
    while passed < seconds:
        count += len(next(stream).rows)
        passed = time.perf_counter() - began
    stream.close()
    return {"images_per_second": count / passed, "images": count, "seconds": passed}
