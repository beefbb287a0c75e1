"""What a rank measures about itself while it trains: waits, rates, memory.

Not responsible for writing them down (monitor.py), nor for the method's own scalars (train.py).
"""

import contextlib
import os
import platform
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moco_ray.data.batch import Batch
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks

SLOW_WAITING_SHARE = 0.3  # of the time that the other ranks spend waiting longer than one


class Slow(NamedTuple):
    """A rank for which the others wait."""

    rank: int
    others_wait_share: float  # of the time, mean over the other ranks
    input_wait_share: float  # of the time that the slow rank itself waits for images


class Meter:
    """The clock of one rank. `pause` time (evaluations, what a checkpoint makes a step wait) is not in its rates."""

    def __init__(self, plan: Plan, ranks: Ranks, start_step: int):
        self._plan, self._ranks = plan, ranks
        self._input_seconds, self._paused_seconds, self._ranks_seconds = 0.0, 0.0, ranks.waits.seconds
        self._last_time, self._last_step = time.perf_counter(), start_step

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the time spent waiting for them is counted."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._input_seconds += time.perf_counter() - began
            yield batch

    @contextlib.contextmanager
    def paused(self):
        """Time in here is not counted into the training rate."""
        began, waited = time.perf_counter(), self._ranks.waits.seconds
        yield
        self._paused_seconds += time.perf_counter() - began
        self._ranks_seconds += self._ranks.waits.seconds - waited

    def rates(self, step: int) -> tuple[dict[str, Any], Slow | None]:
        """Scalars of the steps since the last call, and the rank that holds the others up, if one does. Collective.

        Waits for other ranks are seen where the host itself waits (gloo); with NCCL they are on the device, and no rank
        is called slow.
        """
        now = time.perf_counter()
        elapsed = max(now - self._last_time - self._paused_seconds, 1e-9)
        steps, waited = step - self._last_step, self._ranks.waits.seconds - self._ranks_seconds
        mine = torch.tensor([self._input_seconds, waited], dtype=torch.float64, device=self._ranks.device) / elapsed
        shares = self._ranks.gather(mine[None], [1] * self._ranks.world).clamp(max=1).tolist()  # world,2
        self._input_seconds, self._paused_seconds, self._ranks_seconds = 0.0, 0.0, self._ranks.waits.seconds
        self._last_time, self._last_step = now, step
        scalars = {
            "images_per_second": steps * self._plan.recipe.batch.global_batch_size / elapsed,
            "input_wait_share": sum(share for share, _ in shares) / len(shares),  # mean over ranks
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # of rank 0
            "workers": self._ranks.world,
        }
        return scalars, slow_rank(shares)


def hardware(device: torch.device) -> str:
    """What computes on `device`, for people: a GPU's name and memory, or this machine's CPU and how much of it there is for us."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "") or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs"


def slow_rank(shares: list[list[float]]) -> Slow | None:
    """The rank for which all others wait: [input wait, wait for other ranks] of each rank. What transfers take, all wait alike."""
    if len(shares) < 2:
        return None
    waits = [waited for _, waited in shares]
    least = min(range(len(waits)), key=waits.__getitem__)
    others = [waited for rank, waited in enumerate(waits) if rank != least]
    if min(others) - waits[least] < SLOW_WAITING_SHARE:
        return None
    return Slow(least, sum(others) / len(others), shares[least][0])
