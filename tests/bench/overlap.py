"""What overlap is worth, and gradients in bfloat16: the step rates of two ranks with and without, in turns in the same processes.

    python -m tests.bench.overlap [--rounds 9] [--link 1gbit] [--only loopback|link]

gloo, one thread a rank, float32. Over the loopback, and, where it can be made (root, `ip` and `tc`), over one that carries no more than `--link` in
all, as a slow cable does, in a network namespace. The ratio is the median over pairs of blocks of five steps, each behind one
that is not counted. The shares are of rank 0's time in exchanges and in waiting for gradients. Results go to
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

WARM_UP, BLOCK, WORLD = 1, 5, 2
WAYS = WITHOUT, WITH, ROUNDED = "without overlap", "with overlap", "with overlap, gradients in bfloat16"
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
    rounded = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"gradient_reduction": "bfloat16"})})
    plans = {name: Plan(rounded if name == ROUNDED else recipe, 1_280_000) for name in WAYS}
    learner, own = Learner.new(recipe), rows_of(plans[WITH], ranks.world, ranks.rank)
    crops = np.random.default_rng(ranks.rank).integers(0, 256, (len(own), 2, pixels, pixels, 3), dtype=np.uint8)
    positions = torch.arange(own.start, own.stop)
    batch, blocks = Batch(0, torch.from_numpy(crops), positions, positions), {name: [] for name in WAYS}
    for number in range(rounds):
        for name in WAYS if number % 2 else reversed(WAYS):
            block, first = Block(batch), learner.step
            outputs = Outputs(lambda *_: None, lambda learner: None, None, lambda step, b=block, f=first: b.completed(f, step), parts=block.parts)
            try:
                train(learner, block.batches(), plans[name], ranks, outputs, overlap=name != WITHOUT)
            except StopIteration:
                blocks[name].append(block)
    found = {}
    for name in WAYS:
        ratios = [apart.seconds / one.seconds for one, apart in zip(blocks[name], blocks[WITHOUT], strict=True)]
        found[name] = {
            "ratio": round(statistics.median(ratios), 3),
            "ratios_of_rounds": [round(ratio, 3) for ratio in ratios],
            "steps_per_second": BLOCK / statistics.median(block.seconds for block in blocks[name]),
            **{f"{part}_share": round(statistics.median(block.shares[part] for block in blocks[name]), 4) for part in ("exchange", "all-reduce")},
        }
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
    parser.add_argument("--rounds", type=int, default=9)
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
    for where in results.keys() - {"threads a rank"}:
        for case, found in (results[where] or {}).items():
            for name in WAYS[1:]:
                print(f"{where}, {case}, {name}: {found[name]['ratio']:.3f} times the rate  {found[name]['ratios_of_rounds']}")
    path.write_text(json.dumps(results, indent=1) + "\n")
