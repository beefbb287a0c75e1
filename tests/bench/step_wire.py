"""Bytes on the wire of a step: the released one, which gathers everything, beside ours. ResNet's place is taken by a network of kilobytes.

Ranks are processes in a network namespace of their own, made for this, and its `lo` is read: all that they sent, with headers, and
nothing else. 32 rows of 224 pixels a rank, K 65536. Gradients would be the same in both and are left out by the small network; those
of a ResNet-50 are 112 MB a rank. Needs root. Not here: times, which the loopback would not tell.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moco_ray.learner import Learner
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from tests import released_step, synthetic
from tests.bench.step_ranks import Told, batches, our_loop, recipe_of, run_ranks

STEPS = 2
ROWS = 1_280_000


def wire(rounds: int, worlds: tuple[int, ...] = (2, 4, 8)) -> dict[str, Any]:
    """In a namespace for each number of ranks; `rounds` is of no use, for bytes do not vary."""
    found = {}
    for world in worlds:
        words = ["unshare", "--net", sys.executable, "-m", "tests.bench.step_wire", str(world)]
        found[f"{world} ranks"] = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    return found


def megabytes_sent() -> float:
    """By this namespace's loopback so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (own,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(own[8]) / 1e6


def _bytes(ranks: Ranks) -> dict[str, float]:
    """MB a step of all ranks together."""
    found = {}
    recipe, small = (recipe_of(ranks.world, "resnet10", 224, contrast={"queue_keys": keys}) for keys in (65536, 1024))
    for name, loop in (
        ("released", lambda: _released(ranks, recipe, True)),
        ("released, its queue kept at home", lambda: _released(ranks, recipe, False)),
        ("ours", lambda: our_loop(synthetic.small_learner(recipe), Plan(recipe, ROWS), ranks)),
        ("ours, K 1024", lambda: our_loop(synthetic.small_learner(small), Plan(small, ROWS), ranks)),
    ):
        told = loop()
        dist.barrier()
        before = megabytes_sent() if ranks.is_first else 0.0
        dist.barrier()
        told.take(STEPS)
        dist.barrier()
        found[name] = ((megabytes_sent() if ranks.is_first else 0.0) - before) / STEPS
        dist.barrier()
    return found


def _released(ranks: Ranks, recipe: Any, send_buffers: bool) -> Told:
    learner: Learner = synthetic.small_learner(recipe)
    model = released_step.Released(learner.f_q, learner.f_k, learner.queue.keys.T.contiguous(), 0.999, 0.2)
    wrapped = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=send_buffers)
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.03)
    crops = next(batches(Plan(recipe, ROWS), ranks)).crops
    images = [(crops[:, view].permute(0, 3, 1, 2) / 255).contiguous() for view in (0, 1)]

    def run(completed: Any) -> None:
        while True:
            released_step.released_step(wrapped, optimizer, *images)
            completed()

    return Told(run)


def compared(found: dict[str, float]) -> dict[str, Any]:
    """The queue's part is what a step with a small one sends less, or with one that is not sent."""
    ratios = {name: round(value / found["ours"], 2) for name, value in found.items() if name.startswith("released")}
    queue = {"released": found["released"] - found["released, its queue kept at home"], "ours": found["ours"] - found["ours, K 1024"]}
    rounded = [{name: round(value, 3) for name, value in table.items()} for table in (found, queue)]
    return {"megabytes_a_step": rounded[0], "times_fewer": ratios, "megabytes_of_queue": rounded[1]}


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print(json.dumps(compared(run_ranks(int(sys.argv[1]), _bytes)[0])))
