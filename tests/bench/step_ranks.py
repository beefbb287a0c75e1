"""Ranks for the step's benchmarks: processes under gloo, and loops that take steps only when told, so that two can take turns.

Not here: what is measured (step_wire.py, step_whole.py).
"""

import multiprocessing
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moco_ray.data.batch import Batch
from moco_ray.learner import Learner
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.train import Outputs, rows_of, train

NORMALISE_ONLY = {"jitter": [0, 0, 0, 0], "grayscale_probability": 0, "blur_probability": 0, "flip_probability": 0}
PATIENCE_SECONDS = 280


def recipe_of(world: int, backbone: str, pixels: int, **changes: dict[str, Any]) -> Recipe:
    """32 rows a rank, which is one BatchNorm group, and K 65536: what the released code computes on so many ranks.

    Images are only normalised: the released code's come augmented from its loaders. Nothing is looked at or written on the way.
    """
    values: dict[str, dict[str, Any]] = {
        "encoder": {"backbone": backbone}, "contrast": {"queue_keys": 65536}, "optimizer": {"learning_rate": 0.03},
        "batch": {"global_batch_size": 32 * world, "bn_group_size": 32, "allow_batchnorm_leak": world == 1},
        "augment": {"image_pixels": pixels, **NORMALISE_ONLY}, "schedule": {"steps": 10**6},
        "run": {"log_every_steps": 10**6, "dictionary_every_steps": 0, "images_every_steps": 0, "checkpoint_every_steps": 10**6},
    }  # fmt: skip
    for section, table in changes.items():
        values[section].update(table)
    return Recipe.parse(values)


def batches(plan: Plan, ranks: Ranks) -> Iterator[Batch]:
    """The same random crops again and again."""
    own, pixels = rows_of(plan, ranks.world, ranks.rank), plan.recipe.augment.image_pixels
    crops = np.random.default_rng(ranks.rank).integers(0, 256, (len(own), 2, pixels, pixels, 3), dtype=np.uint8)
    positions = torch.arange(own.start, own.stop)
    while True:
        yield Batch(0, torch.from_numpy(crops), positions, positions)


class Told:
    """Something that takes steps in a thread of its own, one after the other, and only as many as it is told."""

    def __init__(self, run: Callable[[Callable[[], None]], None]):
        """`run(completed)` calls `completed()` after each step, which returns when another may be taken."""
        self._permits, self._done = threading.Semaphore(0), queue.Queue()
        self._run = run
        threading.Thread(target=self._begin, daemon=True).start()
        self.take(1)  # the first step sets much up

    def take(self, steps: int) -> None:
        """Returns when so many are completed. Raises what the thread raised."""
        for _ in range(steps):
            self._permits.release()
            failure = self._done.get(timeout=PATIENCE_SECONDS)
            if failure is not None:
                raise failure

    def _begin(self) -> None:
        torch.set_num_threads(1)
        self._permits.acquire()
        try:
            self._run(self._completed)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._done.put(error)

    def _completed(self) -> None:
        self._done.put(None)
        self._permits.acquire()


def our_loop(learner: Learner, plan: Plan, ranks: Ranks) -> Told:
    """moco_ray's own loop."""

    def run(completed: Callable[[], None]) -> None:
        outputs = Outputs(lambda *_: None, lambda learner: None, None, lambda step: bool(completed()))
        train(learner, batches(plan, ranks), plan, ranks, outputs)

    return Told(run)


def run_ranks(world: int, function: Callable, *arguments: Any) -> list[Any]:
    """`function(ranks, *arguments)` on so many processes of one thread each; the results in rank order."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes = [context.Process(target=_rank, args=(answers, rank, world, store, function, arguments)) for rank in range(world)]
        for process in processes:
            process.start()
        found = dict(answers.get() for _ in processes)
        for process in processes:
            process.join()
    failed = [answer for answer in found.values() if isinstance(answer, Exception)]
    if failed:
        raise failed[0]
    return [found[rank] for rank in range(world)]


def _rank(answers: Any, rank: int, world: int, store: str, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        answer = function(Ranks.current(), *arguments)
    except Exception as error:  # noqa: BLE001 - the starter raises it
        answer = error
    answers.put((rank, answer))
    os._exit(0)  # loops wait in threads for steps that nobody will ask for
