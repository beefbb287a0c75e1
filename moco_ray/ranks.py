"""The ranks of a run: the one door to torch.distributed. Works alone at world size 1.

Every rank makes the same calls in the same order. Not here: who owns which rows (plan.py), and how
the process group came about (Ray Train's TorchConfig, or a test).
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

T = TypeVar("T")
S = TypeVar("S")


class Waits:
    """Seconds that this rank's host spent in collectives of a step: for others to come, and for the transfer."""

    def __init__(self):
        self.seconds = 0.0
        self.gradients_at = 0.0  # when this rank had computed the last of its gradients

    @contextlib.contextmanager
    def counted(self):
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class UnderWay(Generic[T]):
    """A collective that was begun. `wait` gives what comes of it, once."""

    def __init__(self, finish: Callable[[], T]):
        self._finish = finish

    @classmethod
    def over(cls, thing: T) -> "UnderWay[T]":
        """What has come already."""
        return cls(lambda: thing)

    def wait(self) -> T:
        return self._finish()

    def then(self, work: Callable[[T], S]) -> "UnderWay[S]":
        """The same, with some work on what comes."""
        return UnderWay(lambda: work(self._finish()))


class Lines:
    """The process groups of a run, and how long their collectives may take."""

    def __init__(self):
        self.groups: list[Any] = [None]  # None: the default one
        self.timeout: timedelta | None = None  # None: as the default group was made


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `world`, computing on `device`."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    waits: Waits = field(default_factory=Waits, compare=False)
    lines: Lines = field(default_factory=Lines, compare=False)
    group: Any = field(default=None, compare=False)  # the process group that is spoken on

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

    def on_a_line_of_their_own(self) -> "Ranks":
        """The same ranks on another process group: what is under way there is in no order with the collectives here. Collective."""
        if self.world == 1:
            return self
        group = dist.new_group(timeout=self.lines.timeout)
        self.lines.groups.append(group)
        return replace(self, group=group)

    def wrap(self, module: nn.Module, in_bfloat16: bool = False) -> nn.Module:
        """`module` with gradients averaged over ranks in backward, rounded on the way if `in_bfloat16`; the module itself at world size 1.

        Buffers are not sent: BatchNorm statistics are averaged when somebody looks, and the queue is
        not part of the module (the released code sends it with every forward).
        """
        if self.world == 1:
            return module
        ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = nn.parallel.DistributedDataParallel(
            module, device_ids=ids, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
        if in_bfloat16:
            wrapped.register_comm_hook(self.group, bf16_compress_hook)
        return wrapped

    @staticmethod
    def reduce_gradients(module: nn.Module, now: bool):
        """Context of one forward and backward pass of a wrapped module; gradients only add up locally unless `now`."""
        return contextlib.nullcontext() if now or not hasattr(module, "no_sync") else module.no_sync()

    def backward(self, loss: Tensor, at_last: Callable[[], None]) -> None:
        """`loss.backward()` of the pass that reduces gradients, with the wait for other ranks counted.

        `at_last` is called when this rank has computed all of its own gradients and waits for the others'.
        """

        def computed() -> None:
            self.waits.gradients_at = time.perf_counter()
            at_last()

        if self.world > 1:  # a callback that is queued before DDP's own, which waits
            loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(computed))
        loss.backward()
        if self.world > 1:
            self.waits.seconds += time.perf_counter() - self.waits.gradients_at

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks, the same bits on all of them; any shape."""
        if self.world > 1:
            values = values.contiguous().clone()
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of all ranks in rank order: (counts[rank], ...) in, (sum(counts), ...) out."""
        return self.begin_gather(rows, counts).wait()

    def begin_gather(self, rows: Tensor, counts: Sequence[int]) -> UnderWay[Tensor]:
        """The same, begun. Ranks may own different numbers of rows; shorter ones are padded for the transfer, because
        gloo refuses uneven sizes.
        """
        if self.world == 1:
            return UnderWay.over(rows)
        most = max(counts)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: len(rows)] = rows
        everyone = rows.new_empty((self.world * most, *rows.shape[1:]))
        work = dist.all_gather_single(everyone, padded, group=self.group, async_op=True)

        def rows_of_all() -> Tensor:
            if min(counts) == most:
                return everyone
            return torch.cat([everyone[r * most : r * most + n] for r, n in enumerate(counts)])

        return self._under_way(work, padded).then(lambda _: rows_of_all())

    def begin_exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> UnderWay[Tensor]:
        """All-to-all of rows: send[r] of mine to rank r, in order; receive[r] from rank r, in rank order."""
        if self.world == 1:
            return UnderWay.over(rows)
        leaving, arrived = rows.contiguous(), rows.new_empty((sum(receive), *rows.shape[1:]))
        work = dist.all_to_all_single(arrived, leaving, list(receive), list(send), group=self.group, async_op=True)
        return self._under_way(work, leaving).then(lambda _: arrived)

    def _under_way(self, work: dist.Work, sent: Tensor) -> UnderWay[Tensor]:
        """`sent` is held until it has left."""

        def arrived() -> Tensor:
            with self.waits.counted():
                work.wait()
            return sent

        return UnderWay(arrived)

    def expect_answers_within(self, seconds: float) -> None:
        """From now on a collective that takes longer raises on the ranks that wait, instead of waiting for ever."""
        if self.world > 1:
            self.lines.timeout = timedelta(seconds=seconds)
            for group in self.lines.groups:
                dist.set_timeout(self.lines.timeout, group)

    def equal(self, values: Tensor) -> Tensor:
        """Whether an integer tensor is equal on all ranks: a bool on the device, the same everywhere."""
        low, high = values.clone(), values.clone()
        if self.world > 1:
            dist.all_reduce(low, dist.ReduceOp.MIN, group=self.group)
            dist.all_reduce(high, dist.ReduceOp.MAX, group=self.group)
        return (low == high).all()

    def same_on_all(self, values: Tensor) -> bool:
        """The same, for the host. Waits for the device."""
        return bool(self.equal(values))

    def gather_objects(self, thing: Any) -> list[Any]:
        """One picklable object of each rank, in rank order, on all ranks. For rare, small things."""
        if self.world == 1:
            return [thing]
        things: list[Any] = [None] * self.world
        dist.all_gather_object(things, thing, group=self.group)
        return things
