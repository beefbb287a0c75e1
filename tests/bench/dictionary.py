"""What looking at the dictionary's health costs: images/s of a run that looks every 10 steps beside one that never does.

    python -m tests.bench.dictionary [--rounds 6] [--threads 1]

One run on one rank, that looks in one block of ten steps and not in the next, so that all else is the same (two runs side by side in one
process differed by 4 % with the same settings). Random crops that lie in memory. The ratio is the median over pairs of blocks, the first
left out. Results go to tests/bench/results/dictionary.json.
"""

import argparse
import contextlib
import json
import statistics
import time
from functools import lru_cache
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from moco_ray.data.batch import Batch
from moco_ray.data.order import EpochOrder
from moco_ray.data.whereabouts import rows_of_slots
from moco_ray.dictionary import Dictionary
from moco_ray.learner import Learner
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.train import Outputs, train

BLOCK = 10
CASES = {
    "the demo's: ResNet-10, 28 pixels, B 256, K 2048": ("resnet10", 28, 256, 32, 2048),
    "ResNet-18, 64 pixels, B 32, K 65536": ("resnet18", 64, 32, 4, 65536),
}


class Clock:
    """Gives the run its batches, and measures blocks of BLOCK steps; `looking` is whether the block at hand is to look."""

    def __init__(self):
        self.looking = True
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def batches(self, rounds: int, batch: Batch):
        for _ in range(2 * rounds):
            began = time.perf_counter()
            for _ in range(BLOCK):
                yield batch
            self.seconds[self.looking].append(time.perf_counter() - began)  # the next is asked for: the block's last step is done
            self.looking = not self.looking


def measure(backbone: str, pixels: int, rows: int, group: int, keys: int, rounds: int) -> dict:
    recipe = Recipe.parse({
        "encoder": {"backbone": backbone, "stem": "imagenet"}, "batch": {"global_batch_size": rows, "bn_group_size": group},
        "contrast": {"queue_keys": keys}, "augment": {"image_pixels": pixels}, "schedule": {"steps": 10**6},
        "run": {"dictionary_every_steps": BLOCK, "checkpoint_every_steps": 10**6, "images_every_steps": 0},
    })  # fmt: skip
    plan, learner, clock = Plan(recipe, 1_280_000), Learner.new(recipe), Clock()
    learner.step, learner.queue.filled = 3000, keys  # in mid-run, and full
    learner.queue.steps = torch.from_numpy(2999 - np.arange(keys - 1, -1, -1) // rows)
    order = lru_cache(4)(lambda epoch: EpochOrder(np.full(1280, 1000), plan, 0, epoch))
    crops = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (rows, 2, pixels, pixels, 3), dtype=np.uint8))
    batch = Batch(0, crops, torch.arange(rows), torch.arange(rows))

    def where(queue):
        return torch.from_numpy(rows_of_slots(queue.steps.numpy(), queue.position, plan, order))

    class Sometimes(Dictionary):
        def due(self, step: int) -> bool:
            return clock.looking and super().due(step)

        def samples(self, step: int) -> bool:
            return clock.looking and super().samples(step)

        def leave(self, completed: int) -> None:
            if clock.looking:
                super().leave(completed)

    outputs = Outputs(lambda *_: None, lambda learner: None, None, rows_of_slots=where)
    with mock.patch("moco_ray.train.Dictionary", Sometimes), contextlib.suppress(StopIteration):
        train(learner, clock.batches(rounds, batch), plan, Ranks(), outputs)
    ratios = [without / looking for looking, without in zip(clock.seconds[True], clock.seconds[False], strict=True)][1:]
    return {
        "images_per_second_looking": BLOCK * rows / statistics.median(clock.seconds[True][1:]),
        "images_per_second_not_looking": BLOCK * rows / statistics.median(clock.seconds[False][1:]),
        "ratio": statistics.median(ratios),
        "ratios_of_rounds": [round(ratio, 4) for ratio in ratios],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {"threads": arguments.threads}
    for name, case in CASES.items():
        results[name] = measure(*case, arguments.rounds)
        print(f"{name}: {results[name]['ratio']:.3f} times the rate  {results[name]['ratios_of_rounds']}", flush=True)
    Path(__file__).with_name("results").joinpath("dictionary.json").write_text(json.dumps(results, indent=1) + "\n")
