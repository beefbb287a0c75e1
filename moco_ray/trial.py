"""Two steps of a run on its own images, thrown away again: does it compute, are the ranks alike, what does it take?

Responsible for taking the steps and for measuring. Not responsible for starting ranks (launch_doctor.py) nor for judging (checks/step.py).
"""

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moco_ray.data.batch import Batch
from moco_ray.leak_probe import Leak, probe_leak
from moco_ray.learner import Learner
from moco_ray.method.schedule import learning_rate
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Evaluation, Recipe, Schedule
from moco_ray.train import Outputs, train

STEPS = 2  # the first one sets much up; the second is timed


class Memory(NamedTuple):
    """Of the device that holds most in proportion."""

    where: str
    peak_bytes: int  # of all ranks there
    total_bytes: int


class Trial(NamedTuple):
    """What two steps told. The same on all ranks."""

    world: int
    loss: float  # of the first step, mean over the batch
    positive_similarity: float  # of the first step
    step_seconds: float  # of the second, without waiting for images
    wait_seconds: float  # for the images of the first, on the slowest rank
    queues_equal: bool
    leak: Leak
    bad_rows: int
    memory: Memory


def trial_plan(plan: Plan) -> Plan:
    """The plan of the trial: the recipe's batch, encoder and first learning rate, for STEPS steps."""
    recipe = plan.recipe
    changes: dict[str, Any] = {
        "optimizer": recipe.optimizer.model_copy(update={"learning_rate": learning_rate(plan, 0)}),
        "schedule": Schedule(steps=STEPS),
        "evaluation": Evaluation(),
        "run": recipe.run.model_copy(update={"log_every_steps": 1, "checkpoint_every_steps": 10**9}),
    }
    return Plan(Recipe.model_validate(recipe.model_copy(update=changes).model_dump()), plan.rows)


def trial(learner: Learner, batches: Iterator[Batch], plan: Plan, ranks: Ranks) -> Trial:
    """Take STEPS steps of `plan` (see `trial_plan`), and probe the last batch for leaks. Collective.

    Raises as training does: NonFinite, and UserError for images that cannot be read.
    """
    held = _Held(batches)
    entries: list[dict[str, Any]] = []
    bad: list = []
    outputs = Outputs(lambda entry, rows: (entries.append(entry), bad.extend(rows)), lambda learner: None, None, held.completed)
    train(learner, iter(held), plan, ranks, outputs)
    assert held.batch is not None and len(held.ends) == STEPS
    equal = ranks.same_on_all(learner.queue.fingerprint())
    leak = probe_leak(learner.f_k, held.batch, plan, ranks, STEPS - 1)
    waited = held.waits[1] if held.asked[1] > held.ends[0] else 0.0  # where the batch was not begun in the step before
    seconds = held.ends[1] - held.ends[0] - waited
    everyone = ranks.gather_objects((seconds, held.waits[0], _memory(ranks)))
    first = entries[0]
    return Trial(
        ranks.world,
        first["loss"],
        first["positive_similarity"],
        max(each[0] for each in everyone),
        max(each[1] for each in everyone),
        equal,
        leak,
        len(bad),
        fullest([each[2] for each in everyone]),
    )


class _Held:
    """The batches, of which the last stays at hand, and the clock of the loop that takes them."""

    def __init__(self, batches: Iterator[Batch]):
        self._batches = batches
        self.batch: Batch | None = None
        self.asked: list[float] = []  # when each batch was asked for
        self.waits: list[float] = []  # seconds for it
        self.ends: list[float] = []  # when each step was over

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.asked.append(time.perf_counter())
            self.batch = next(self._batches)
            self.waits.append(time.perf_counter() - self.asked[-1])
            yield self.batch

    def completed(self, step: int) -> bool:
        self.ends.append(time.perf_counter())
        return False


def fullest(memories: list[Memory]) -> Memory:
    """The fullest place; ranks on one machine's CPUs share its memory."""
    sums: dict[str, Memory] = {}
    for one in memories:
        before = sums.get(one.where)
        sums[one.where] = one._replace(peak_bytes=one.peak_bytes + (before.peak_bytes if before else 0))
    return max(sums.values(), key=lambda memory: memory.peak_bytes / memory.total_bytes)


def _memory(ranks: Ranks) -> Memory:
    host, device = socket.gethostname(), ranks.device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return Memory(f"GPU {device.index} of rank {ranks.rank} on {host}", torch.cuda.max_memory_reserved(device), total)
    return Memory(host, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, machine_bytes())


def machine_bytes() -> int:
    """Memory of this machine, or of the container that this process is in, if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # "max", or no cgroup
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
