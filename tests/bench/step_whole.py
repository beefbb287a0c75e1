"""A whole step beside the released one, on 1, 2 and 4 ranks; and the share of a step that is neither encoder nor optimizer.

Both take the same 32 rows a rank of images in memory, with ResNet-18 at 64 pixels and K 65536; the released step gets them as
normalised float32, ours as uint8 crops. Loops take turns of STEPS steps in the same processes; a turn is the clock's time between two
barriers. Not here: reading and augmenting images (input.py), parts alone (step_parts.py).
"""

import statistics
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from moco_ray.data.augment import colour_stage
from moco_ray.learner import Learner
from moco_ray.method.contrast import info_nce
from moco_ray.method.encoder import build_backbone, width_of
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from tests import released_step
from tests.bench.step_ranks import Told, batches, our_loop, recipe_of, run_ranks

STEPS = 2
ROWS = 1_280_000
BACKBONE, PIXELS = "resnet18", 64


def whole(rounds: int, worlds: tuple[int, ...] = (1, 2, 4)) -> dict[str, Any]:
    return {f"{world} rank{'s' * (world > 1)}": run_ranks(world, _whole, rounds)[0] for world in worlds}


def _whole(ranks: Ranks, rounds: int) -> dict[str, Any]:
    loops = {"released": released_loop(ranks, recipe_of(ranks.world, BACKBONE, PIXELS))}
    for precision in ("float32", "bfloat16"):
        recipe = recipe_of(ranks.world, BACKBONE, PIXELS, encoder={"precision": precision})  # channels_last, the default
        loops[f"ours, {precision}"] = our_loop(Learner.new(recipe), Plan(recipe, ROWS), ranks)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            dist.barrier()
            began = time.perf_counter()
            loop.take(STEPS)
            dist.barrier()
            seconds[name].append((time.perf_counter() - began) / STEPS)
    times = {name: [a / b for a, b in zip(seconds["released"], values, strict=True)] for name, values in seconds.items() if name != "released"}
    return {
        "seconds_a_step": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "times": {name: round(statistics.median(ratios), 2) for name, ratios in times.items()},
        "times_of_rounds": {name: [round(ratio, 2) for ratio in ratios] for name, ratios in times.items()},
    }


def released_loop(ranks: Ranks, recipe: Any) -> Told:
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


class Clock:
    """CPU seconds of this thread in each part. What a part calls that is timed itself is counted there."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._open: list[tuple[str, float]] = []

    def enter(self, name: str) -> None:
        self._stop()
        self._open.append((name, time.thread_time()))

    def leave(self) -> None:
        self._stop()
        self._open.pop()
        if self._open:
            self._open[-1] = (self._open[-1][0], time.thread_time())

    def _stop(self) -> None:
        if self._open:
            name, began = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - began

    def timed(self, name: str, function: Any) -> Any:
        def work(*arguments: Any, **named: Any) -> Any:
            self.enter(name)
            try:
                return function(*arguments, **named)
            finally:
                self.leave()

        return work


def share(rounds: int) -> dict[str, Any]:
    """ResNet-50 at 224 pixels, 32 rows, K 65536, one rank and thread, MoCo v2's augmentation, 8 BatchNorm groups of 4."""
    found = {}
    for precision in ("float32", "bfloat16"):
        torch.set_num_threads(1)
        changes = {"batch": {"bn_group_size": 4}, "encoder": {"precision": precision}}
        found[precision] = shares_of(recipe_of(1, "resnet50", 224, **changes, augment=dict(
            jitter=[0.4, 0.4, 0.4, 0.1], grayscale_probability=0.2, blur_probability=0.5, flip_probability=0.5)), rounds)  # fmt: skip
    return found


def shares_of(recipe: Any, steps: int) -> dict[str, Any]:
    learner, clock = Learner.new(recipe), Clock()
    for encoder, name in ((learner.f_q, "query encoder"), (learner.f_k, "key encoder")):
        encoder.forward = clock.timed(name, encoder.forward)
    learner.optimizer.step = clock.timed("optimizer", learner.optimizer.step)
    parts = {
        "torch.Tensor.backward": clock.timed("query encoder, backward", torch.Tensor.backward),
        "moco_ray.train.info_nce": clock.timed("loss", info_nce),
        "moco_ray.train.colour_stage": clock.timed("colour stage", colour_stage),
    }
    patches = [mock.patch(name, part) for name, part in parts.items()]
    for patch in patches:
        patch.start()
    began = [0.0]

    def completed() -> None:
        clock.leave()
        clock.seconds.clear() if not began[0] else None
        began[0] += 1
        clock.enter("the rest")

    def run(done: Any) -> None:
        clock.enter("the rest")
        from moco_ray.train import Outputs, train

        outputs = Outputs(lambda *_: None, lambda learner: None, None, lambda step: bool((completed(), done())[1]))
        train(learner, batches(Plan(recipe, ROWS), Ranks()), Plan(recipe, ROWS), Ranks(), outputs)

    Told(run).take(steps)
    for patch in patches:
        patch.stop()
    total = sum(clock.seconds.values())
    encoders = sum(seconds for name, seconds in clock.seconds.items() if "encoder" in name or name == "optimizer")
    return {
        "seconds_a_step": round(total / steps, 3),
        "shares": {name: round(seconds / total, 4) for name, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1])},
        "neither_encoder_nor_optimizer": round(1 - encoders / total, 4),
    }
