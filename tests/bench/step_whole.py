"""A whole step beside the released one, on 1, 2 and 4 ranks; and the share of a step that is neither encoder nor optimizer.

Both take the same 32 rows a rank of images in memory, with ResNet-18 at 64 pixels and K 65536; the released step gets them as
normalised float32, ours as uint8 crops. Loops take turns of STEPS steps in the same processes. A turn is the CPU time of all ranks with
their gloo threads, which neighbours of the machine do not move much; the clock's time between two barriers stands beside it. Not here:
reading and augmenting images (input.py), parts alone (step_parts.py).
"""

import contextlib
import itertools
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moco_ray.learner import Learner
from moco_ray.method.encoder import build_backbone, width_of
from moco_ray.parts import Parts
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.train import Outputs, train
from tests import released_step
from tests.bench.step_ranks import Told, batches, our_loop, recipe_of, run_ranks

STEPS = 2
ROWS = 1_280_000
BACKBONE, PIXELS = "resnet18", 64
AUGMENT = {"jitter": [0.4, 0.4, 0.4, 0.1], "grayscale_probability": 0.2, "blur_probability": 0.5, "flip_probability": 0.5}  # MoCo v2's


def whole(rounds: int, worlds: tuple[int, ...] = (1, 2, 4)) -> dict[str, Any]:
    return {f"{world} rank{'s' * (world > 1)}": run_ranks(world, _whole, rounds)[0] for world in worlds}


def _whole(ranks: Ranks, rounds: int) -> dict[str, Any]:
    loops = {"released": released_loop(ranks, recipe_of(ranks.world, BACKBONE, PIXELS))}
    for precision in ("float32", "bfloat16"):
        recipe = recipe_of(ranks.world, BACKBONE, PIXELS, encoder={"precision": precision})  # channels_last, the default
        loops[f"ours, {precision}"] = our_loop(Learner.new(recipe), Plan(recipe, ROWS), ranks)
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    clock: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            loop.take(STEPS)
            used = torch.tensor(time.process_time() - used)
            dist.barrier()
            clock[name].append((time.perf_counter() - began) / STEPS)
            dist.all_reduce(used)
            cpu[name].append(used.item() / STEPS)
    found = {}
    for kind, seconds in (("", cpu), ("_by_the_clock", clock)):
        ratios = {name: [a / b for a, b in zip(seconds["released"], values, strict=True)] for name, values in seconds.items() if name != "released"}
        found[f"seconds_a_step{kind}"] = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
        found[f"times{kind}"] = {name: round(statistics.median(values), 2) for name, values in ratios.items()}
    return found


def released_loop(ranks: Ranks, recipe: Recipe) -> Told:
    """The released step in DDP with its settings, contiguous and float32 as there."""
    network = [_network(recipe.encoder.backbone) for _ in range(2)]
    network[1].load_state_dict(network[0].state_dict())
    queue = nn.functional.normalize(torch.randn(128, recipe.contrast.queue_keys), dim=0)
    model = nn.parallel.DistributedDataParallel(released_step.Released(*network, queue, recipe.contrast.key_momentum, recipe.contrast.temperature))
    optimizer = torch.optim.SGD(model.parameters(), recipe.optimizer.learning_rate, momentum=0.9, weight_decay=1e-4)
    batch = next(batches(Plan(recipe, ROWS), ranks))
    mean, std = (torch.tensor(values)[:, None, None] for values in (recipe.augment.mean, recipe.augment.std))
    images = [((batch.crops[:, view].permute(0, 3, 1, 2) / 255 - mean) / std).contiguous() for view in (0, 1)]

    def run(completed: Any) -> None:
        while True:
            released_step.released_step(model, optimizer, *images)
            completed()

    return Told(run)


def _network(backbone: str) -> nn.Module:
    width = width_of(backbone)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(build_backbone(backbone, "imagenet"), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128))


# --- shares -------------------------------------------------------------------------------------------------------------


COUNTED = ("key forward", "query forward", "backward", "all-reduce", "optimizer")


class ThreadParts(Parts):
    """The loop's own clock of its parts, by CPU seconds of the thread."""

    def _time(self) -> float:
        return time.thread_time()


def share(rounds: int) -> dict[str, Any]:
    """ResNet-50 at 224 pixels, 32 rows, K 65536, one rank and thread, MoCo v2's augmentation, 8 BatchNorm groups of 4."""
    found = {}
    for precision in ("float32", "bfloat16"):
        recipe = recipe_of(1, "resnet50", 224, batch={"bn_group_size": 4}, encoder={"precision": precision}, augment=AUGMENT)
        found[precision] = shares_of(recipe, rounds, Ranks(), ThreadParts())
    return found


def shares_of(recipe: Recipe, steps: int, ranks: Ranks, parts: Parts) -> dict[str, Any]:
    """Of the loop's steps, the first two left out, on one rank."""
    plan = Plan(recipe, ROWS)

    def completed(step: int) -> bool:
        if step == 2:  # they set much up
            parts.start()
        return False

    outputs = Outputs(lambda *_: None, lambda learner: None, None, completed)._replace(parts=parts)
    with contextlib.suppress(StopIteration):  # no more rows
        train(Learner.new(recipe, ranks.device), itertools.islice(batches(plan, ranks), steps + 2), plan, ranks, outputs)
    seconds = parts.stop()
    total = sum(seconds.values())
    return {
        "seconds_a_step": round(total / steps, 4),
        "shares": {name: round(value / total, 4) for name, value in sorted(seconds.items(), key=lambda item: -item[1]) if value},
        "neither_encoder_nor_optimizer": round(1 - sum(seconds[name] for name in COUNTED) / total, 4),
    }
