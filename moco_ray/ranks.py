"""The ranks of a run: the one door to torch.distributed. Works alone at world size 1.

Every rank makes the same calls in the same order. Not here: who owns which rows (plan.py), and how
the process group came about (Ray Train's TorchConfig, or a test).
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Waits:
    """Seconds that this rank's host spent in collectives of the forward pass: for others to come, and for the transfer."""

    def __init__(self):
        self.seconds = 0.0

    @contextlib.contextmanager
    def counted(self):
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `world`, computing on `device`."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    waits: Waits = field(default_factory=Waits, compare=False)

    @classmethod
    def current(cls, device: torch.device | str = "cpu") -> "Ranks":
        """The ranks of the initialised default process group, or a world of one."""
        device = torch.device(device)
        if not dist.is_initialized():
            return cls(device=device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module` with gradients averaged over ranks in backward; the module itself at world size 1.

        Buffers are not sent: BatchNorm statistics are averaged when somebody looks, and the queue is
        not part of the module (the released code sends it with every forward).
        """
        if self.world == 1:
            return module
        ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(
            module, device_ids=ids, forward_sync_buffers=False, gradient_as_bucket_view=True
        )

    @staticmethod
    def reduce_gradients(module: nn.Module, now: bool):
        """Context of one backward pass of a wrapped module; gradients only add up locally unless `now`."""
        return contextlib.nullcontext() if now or not hasattr(module, "no_sync") else module.no_sync()

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks, the same bits on all of them; any shape."""
        if self.world > 1:
            values = values.contiguous().clone()
            dist.all_reduce(values)
        return values

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of all ranks in rank order: (counts[rank], ...) in, (sum(counts), ...) out.

        Ranks may own different numbers of rows; shorter ones are padded for the transfer, because
        gloo refuses uneven sizes.
        """
        if self.world == 1:
            return rows
        most = max(counts)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: len(rows)] = rows
        everyone = rows.new_empty((self.world * most, *rows.shape[1:]))
        with self.waits.counted():
            dist.all_gather_single(everyone, padded)
        if min(counts) == most:
            return everyone
        return torch.cat([everyone[r * most : r * most + n] for r, n in enumerate(counts)])

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """All-to-all of rows: send[r] of mine to rank r, in order; receive[r] from rank r, in rank order."""
        if self.world == 1:
            return rows
        arrived = rows.new_empty((sum(receive), *rows.shape[1:]))
        with self.waits.counted():
            dist.all_to_all_single(arrived, rows.contiguous(), list(receive), list(send))
        return arrived

    def expect_answers_within(self, seconds: float) -> None:
        """From now on a collective that takes longer raises on the ranks that wait, instead of waiting for ever."""
        if self.world > 1:
            dist.set_timeout(timedelta(seconds=seconds))

    def equal(self, values: Tensor) -> Tensor:
        """Whether an integer tensor is equal on all ranks: a bool on the device, the same everywhere."""
        low, high = values.clone(), values.clone()
        if self.world > 1:
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
        return (low == high).all()

    def same_on_all(self, values: Tensor) -> bool:
        """The same, for the host. Waits for the device."""
        return bool(self.equal(values))

    def gather_objects(self, thing: Any) -> list[Any]:
        """One picklable object of each rank, in rank order, on all ranks. For rare, small things."""
        if self.world == 1:
            return [thing]
        things: list[Any] = [None] * self.world
        dist.all_gather_object(things, thing)
        return things
