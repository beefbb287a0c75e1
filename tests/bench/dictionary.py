"""What looking at the dictionary's health costs: images/s of a run that looks every 10 steps beside one that never does.

    python -m tests.bench.dictionary [--rounds 6] [--threads 1]

Two runs in one process, in turn ten steps of each, each run in a thread of its own that holds the baton while it steps. Random crops that lie
in memory, one rank. The ratio is of the medians over the rounds, the first of which is left out. Results go to tests/bench/results/dictionary.json.
"""

import argparse
import contextlib
import json
import statistics
import threading
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from moco_ray.data.batch import Batch
from moco_ray.data.order import EpochOrder
from moco_ray.data.whereabouts import rows_of_slots
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


class Turns:
    """Two runs take turns of BLOCK steps; `seconds[i]` are those of run i."""

    def __init__(self):
        self.seconds: tuple[list[float], list[float]] = ([], [])
        self._free = (threading.Semaphore(1), threading.Semaphore(0))

    def batches(self, which: int, rounds: int, batch: Batch):
        for _ in range(rounds):
            self._free[which].acquire()
            began = time.perf_counter()
            for _ in range(BLOCK):
                yield batch
            # asked for the next: the block's last step is done
            self.seconds[which].append(time.perf_counter() - began)
            self._free[1 - which].release()


def measure(backbone: str, pixels: int, rows: int, group: int, keys: int, rounds: int) -> dict:
    turns = Turns()

    def run(which: int, every: int) -> None:
        recipe = Recipe.parse({
            "encoder": {"backbone": backbone, "stem": "imagenet"}, "batch": {"global_batch_size": rows, "bn_group_size": group},
            "contrast": {"queue_keys": keys}, "augment": {"image_pixels": pixels}, "schedule": {"steps": 10**6},
            "run": {"dictionary_every_steps": every, "checkpoint_every_steps": 10**6, "images_every_steps": 0},
        })  # fmt: skip
        plan, learner = Plan(recipe, 1_280_000), Learner.new(recipe)
        learner.step, learner.queue.filled = 3000, keys  # in mid-run, and full
        learner.queue.steps = torch.from_numpy(2999 - np.arange(keys - 1, -1, -1) // rows)
        order = lru_cache(4)(lambda epoch: EpochOrder(np.full(1280, 1000), plan, 0, epoch))
        crops = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (rows, 2, pixels, pixels, 3), dtype=np.uint8))
        batch = Batch(0, crops, torch.arange(rows), torch.arange(rows))
        where = lambda queue: torch.from_numpy(rows_of_slots(queue.steps.numpy(), queue.position, plan, order))  # noqa: E731
        outputs = Outputs(lambda *_: None, lambda learner: None, None, rows_of_slots=where)
        with contextlib.suppress(StopIteration):
            train(learner, turns.batches(which, rounds, batch), plan, Ranks(), outputs)

    threads = [threading.Thread(target=run, args=each) for each in ((0, 10), (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    looking, not_looking = (statistics.median(seconds[1:]) for seconds in turns.seconds)
    return {
        "images_per_second_looking": BLOCK * rows / looking,
        "images_per_second_not_looking": BLOCK * rows / not_looking,
        "ratio": not_looking / looking,
        "ratios_of_rounds": [round(b / a, 4) for a, b in zip(*turns.seconds, strict=True)],
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
