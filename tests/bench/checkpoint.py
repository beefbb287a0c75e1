"""What a checkpoint in flight costs the steps beside it: the same loop, with and without, interleaved in one process.

    python -m tests.bench.checkpoint            # writes tests/bench/results/checkpoint.json

The state is that of MoCo v2 (ResNet-50, MLP, K = 65536): 370 MB. One worker, no Ray; the batch is small, for a CPU. Reference:
the same steps without a checkpoint. The ratio is of medians over the steps that began while one was being saved. Once with
as many threads as cores, and once with a core left over, as a worker has that computes on a GPU; at the niceness that Ray
gives its workers.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from moco_ray import checkpoint
from moco_ray.data.storage import Store
from moco_ray.learner import Learner
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.saver import Saver
from moco_ray.train import Outputs, train
from tests.object_stores import rclone_server
from tests.synthetic import batches

OVERRIDES = [
    "batch.global_batch_size=16", "batch.bn_group_size=4", "augment.image_pixels=96", "schedule.epochs=0", "schedule.steps=100000",
    "run.log_every_steps=1", "run.checkpoint_every_steps=100000", "run.checkpoint_every_minutes=0",
]  # fmt: skip
RAYS_NICENESS = 15
ALONE = 4  # steps without a save between two saves


class Enough(Exception):
    """Ends the loop."""


def measure(run: Store, rounds: int, threads: int) -> dict:
    torch.set_num_threads(threads)
    recipe = Recipe.of_overrides(OVERRIDES)
    plan, learner, told = Plan(recipe, 1000), Learner.new(recipe), []
    about = {"recipe_fingerprint": recipe.fingerprint(), "data_fingerprint": "d", "order_version": 2}

    def write(step, state):
        return checkpoint.save(run, step, 1, checkpoint.pack(state, about), about, keep=2)

    saver = Saver(write, lambda **message: told.append(message))
    alone, beside, waited = [], [], []
    clock = {"last": None, "quiet": 0, "saves": 0}

    def completed(step: int) -> bool:
        now, saving = time.perf_counter(), saver._writing is not None and not saver._writing.done()
        if clock["last"] is not None and step > 3:
            (beside if clock["was_saving"] else alone).append(now - clock["last"])  # a save may end within a step
        clock["quiet"] = 0 if saving else clock["quiet"] + 1
        if clock["quiet"] > ALONE:
            if clock["saves"] == rounds:
                raise Enough
            began = time.perf_counter()
            saver.save(step, learner.state_dict())
            waited.append(time.perf_counter() - began)
            clock["saves"] += 1
            clock["quiet"] = 0
        clock["was_saving"] = saver._writing is not None and not saver._writing.done()
        clock["last"] = time.perf_counter()
        return False

    def rows() -> Iterator:
        yield from batches(plan, Ranks())

    try:
        train(learner, rows(), plan, Ranks(), Outputs(lambda *a: None, lambda *a: None, lambda *a: {}, completed))
    except Enough:
        saver.finish()
    return {
        "checkpoint_bytes": told[-1]["bytes"],
        "saves": len([m for m in told if m["kind"] == "saved"]),
        "seconds_a_save": statistics.median(m["seconds"] for m in told),
        "seconds_the_step_waits_for_the_copy": statistics.median(waited),
        "step_seconds_alone": statistics.median(alone),
        "step_seconds_beside_a_save": statistics.median(beside),
        "ratio": statistics.median(beside) / statistics.median(alone),
        "steps": [len(alone), len(beside)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "checkpoint.json")
    arguments = parser.parse_args()
    os.nice(RAYS_NICENESS)
    cores = os.cpu_count()
    found = {"cores": cores}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bucket").mkdir()
        with rclone_server(Path(folder)) as server:
            endpoint = server.endpoint.removeprefix("http://")
            os.environ |= server.environment()
            s3 = Store.at(f"s3://bucket/run?endpoint_override={endpoint}&scheme=http&region=us-east-1")
            for threads in (cores, cores - 1):
                for name, run in (("local disk", Store(folder)), ("S3 server on this machine", s3)):
                    found[f"{name}, {threads} threads"] = measure(run, arguments.rounds, threads)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
