"""What overlap is worth: the step rate of two ranks with it beside without it, in turns in the same processes.

    python -m tests.bench.overlap [--rounds 5] [--link 1gbit] [--only loopback|link]

gloo, one thread a rank, float32. Over the loopback, and, where it can be made (root, `ip` and `tc`), over one that carries no more than `--link` in
all, as a slow cable does, in a network namespace. The ratio is the median over pairs of blocks of ten steps; before each block come
two steps that are not counted. The shares are of rank 0's time in exchanges and in waiting for gradients. Results go to
tests/bench/results/overlap.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from moco_ray.data.batch import Batch
from moco_ray.learner import Learner
from moco_ray.parts import Parts
from moco_ray.plan import Plan, rows_of
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.train import Outputs, train

WARM_UP, BLOCK, WORLD = 2, 10, 2
CASES = {  # backbone, pixels, global batch, group, K
    "ResNet-10, 64 pixels, B 64, K 4096": ("resnet10", 64, 64, 8, 4096),
    "ResNet-18, 64 pixels, B 32, K 65536": ("resnet18", 64, 32, 4, 65536),
}


class Block:
    """Batches for one block of steps of a run in progress, and its clock."""

    def __init__(self, batch: Batch):
        self._batch, self.parts, self.seconds, self.shares = batch, Parts(), 0.0, {}

    def batches(self):
        for _ in range(WARM_UP + BLOCK):
            yield self._batch

    def completed(self, first: int, step: int) -> bool:
        if step == first + WARM_UP:
            self._began = time.perf_counter()
            self.parts.start()
        if step == first + WARM_UP + BLOCK:
            self.seconds, spent = time.perf_counter() - self._began, self.parts.stop()
            self.shares = {name: spent[name] / sum(spent.values()) for name in ("exchange", "all-reduce")}
        return False


def measure(ranks: Ranks, backbone: str, pixels: int, rows: int, group: int, keys: int, rounds: int) -> dict:
    recipe = Recipe.parse({
        "encoder": {"backbone": backbone, "stem": "imagenet"}, "batch": {"global_batch_size": rows, "bn_group_size": group},
        "contrast": {"queue_keys": keys}, "augment": {"image_pixels": pixels}, "schedule": {"steps": 10**6},
        "run": {"checkpoint_every_steps": 10**6, "images_every_steps": 0},
    })  # fmt: skip
    plan, learner, own = Plan(recipe, 1_280_000), Learner.new(recipe), rows_of(Plan(recipe, 1_280_000), ranks.world, ranks.rank)
    crops = np.random.default_rng(ranks.rank).integers(0, 256, (len(own), 2, pixels, pixels, 3), dtype=np.uint8)
    positions = torch.arange(own.start, own.stop)
    batch, blocks = Batch(0, torch.from_numpy(crops), positions, positions), {True: [], False: []}
    for _ in range(rounds):
        for overlap in (True, False):
            block, first = Block(batch), learner.step
            outputs = Outputs(lambda *_: None, lambda learner: None, None, lambda step, b=block, f=first: b.completed(f, step), parts=block.parts)
            try:
                train(learner, block.batches(), plan, ranks, outputs, overlap)
            except StopIteration:
                blocks[overlap].append(block)
    ratios = [apart.seconds / together.seconds for together, apart in zip(blocks[True], blocks[False], strict=True)]
    found = {"ratio": statistics.median(ratios), "ratios_of_rounds": [round(ratio, 3) for ratio in ratios]}
    for overlap, name in ((True, "with"), (False, "without")):
        found[f"steps_per_second_{name}"] = BLOCK / statistics.median(block.seconds for block in blocks[overlap])
        for part in ("exchange", "all-reduce"):
            found[f"{part}_share_{name}"] = round(statistics.median(block.shares[part] for block in blocks[overlap]), 4)
    return found


def rank_main(rank: int, store: str, rounds: int) -> None:
    """One rank: measures all cases; the first prints them."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = {name: measure(Ranks.current(), *case, rounds) for name, case in CASES.items()}
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def both(rounds: int, before: tuple[str, ...] = ()) -> dict:
    """Two ranks, started behind the words of `before`; what the first measured."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*before, sys.executable, "-m", "tests.bench.overlap", "--rounds", str(rounds), "--store", f"{folder}/store", "--rank"]
        ranks = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(WORLD)]
        outputs = [process.communicate()[0] for process in ranks]
        assert not any(process.returncode for process in ranks)
    return json.loads(outputs[0].splitlines()[-1])


def over_a_slow_link(rounds: int, link: str) -> dict | None:
    """The same in a namespace whose loopback carries `link` in all; None where that cannot be made."""
    name = f"link{os.getpid()}"
    if os.geteuid() or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return None
    try:
        inside = ("ip", "netns", "exec", name)
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        shape = [*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", link, "burst", "256kb", "limit", "64mb"]
        return None if subprocess.run(shape).returncode else both(rounds, inside)
    finally:
        subprocess.run(["ip", "netns", "delete", name])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--only", choices=("loopback", "link"))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments.rank, arguments.store, arguments.rounds)
        raise SystemExit
    path = Path(__file__).with_name("results") / "overlap.json"
    results = json.loads(path.read_text()) if path.exists() else {"threads a rank": 1}
    if arguments.only != "link":
        results["loopback"] = both(arguments.rounds)
    if arguments.only != "loopback":
        results[arguments.link] = over_a_slow_link(arguments.rounds, arguments.link)
    for where, cases in results.items():
        for case, found in (cases or {}).items() if where != "threads a rank" else ():
            print(f"{where}, {case}: {found['ratio']:.3f} times the rate  {found['ratios_of_rounds']}")
    path.write_text(json.dumps(results, indent=1) + "\n")
