"""What of a step is done while the step before it computes: its images read, moved to the device, and its key crops exchanged.

The same numbers as if it were done when the step begins: which rows, which permutation and which colours is a function of
the step. Not responsible for what a step computes (train.py) nor for where the images come from. N own rows, B rows of
all ranks; a slot is a place in the shuffled batch.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from moco_ray.data.augment import colour_stage
from moco_ray.data.batch import Batch
from moco_ray.method.encoder import working_dtype
from moco_ray.method.shuffle import begin_shuffle, permutation, route
from moco_ray.parts import Parts
from moco_ray.plan import Plan, passes, rows_of
from moco_ray.ranks import Ranks, UnderWay

VIEWS = ((0, 1), (1, 0))  # (query view, key view) of each direction; the symmetric form uses both


@dataclass(frozen=True)
class View:
    """One view of some rows of a step, for an encoder."""

    crops: Tensor  # n,H,W,3 uint8
    positions: Tensor  # n int64, on the host: of the rows in the epoch
    epoch: int
    view: int
    coloured: Tensor | None = None  # n,3,H,W, where it is made ahead

    def inputs(self, rows: slice, plan: Plan) -> Tensor:
        """After the colour stage: n,3,H,W of the encoder's dtype and memory format."""
        if self.coloured is not None:
            return self.coloured[rows]
        recipe = plan.recipe
        positions, dtype = self.positions[rows].cpu().numpy(), working_dtype(recipe.encoder)
        x = colour_stage(self.crops[rows], positions, self.view, recipe.run.seed, self.epoch, recipe.augment, dtype)
        return x.contiguous() if recipe.run.memory_format == "contiguous" else x


class Slots(NamedTuple):
    """The key crops of a rank's own slots, in order, which are of other rows; `perm` B: the row of every slot."""

    view: View
    perm: Tensor


class Prepared(NamedTuple):
    """One rank's part of a step, ready to be computed."""

    batch: Batch  # on the device
    queries: list[View]  # of each direction
    slots: list[Slots]  # of each direction


class Ahead:
    """Takes one batch after the other, and begins the next one early where that hides something.

    All ranks make the same calls in the same order. The exchange has a process group of its own, so that it is not in the order of the
    other collectives. What goes wrong early is raised when its step begins, on the ranks that it would have been
    raised on: the step before it is not lost.
    """

    def __init__(self, batches: Iterator[Batch], plan: Plan, ranks: Ranks, parts: Parts, overlap: bool = True):
        """With `overlap`, where there are other ranks or a GPU; otherwise each batch is begun when it is taken. Collective."""
        self._batches, self._plan, self._parts = batches, plan, parts
        self._early = overlap and (ranks.world > 1 or ranks.device.type == "cuda")
        self._ranks = ranks.on_a_line_of_their_own() if self._early else ranks
        self._begun: _Begun | _Arrived | Exception | None = None
        # Not tried: no GPU was at hand.
        self._stream = torch.cuda.Stream(ranks.device) if self._early and ranks.device.type == "cuda" else None

    def take(self, step: int) -> Prepared:
        """The batch of a step. Then the next one is begun, if the run has one: nothing is read that is not trained on.

        Raises what the iterator raised, StopIteration too.
        """
        begun, self._begun = self._begun or self._begin(step), None
        if isinstance(begun, Exception):
            raise begun
        with self._parts("exchange"):
            prepared = begun.wait()
        if self._stream is not None:
            _hand_over(prepared, self._stream)
        if self._early and step + 1 < self._plan.total_steps:
            self._begin_early(step + 1)
        return prepared

    def _begin_early(self, step: int) -> None:
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
                self._begun = self._begin(step)
                if self._stream is not None:  # the stream waits for what arrives, and the host does not
                    self._begun = _Arrived(self._begun.wait(), self._plan)
        except Exception as error:  # noqa: BLE001  raised when the step begins
            self._begun = error

    def _begin(self, step: int) -> "_Begun":
        with self._parts("input"):
            batch = next(self._batches)
            batch = batch._replace(crops=_on_device(batch.crops, self._ranks.device))
        directions = range(2 if self._plan.recipe.contrast.symmetric else 1)
        with self._parts("exchange"):
            return _Begun(batch, [begin_exchange(batch, self._plan, self._ranks, (step, d)) for d in directions])


class _Begun:
    """A batch whose key crops are under way."""

    def __init__(self, batch: Batch, exchanges: list[UnderWay[Slots]]):
        self._batch, self._exchanges = batch, exchanges

    def wait(self) -> Prepared:
        batch, views = self._batch, [VIEWS[direction][0] for direction in range(len(self._exchanges))]
        queries = [View(batch.crops[:, view], batch.positions, batch.epoch, view) for view in views]
        return Prepared(batch, queries, [exchange.wait() for exchange in self._exchanges])


class _Arrived:
    """One whose key crops arrive on a stream beside the one that computes, where the colour stage is done too.

    Not where a step is cut into passes: the coloured images of all of them would lie in memory, which the passes are to save.
    """

    def __init__(self, arrived: Prepared, plan: Plan):
        def coloured(view: View) -> View:
            whole = slice(0, len(view.crops))
            return replace(view, coloured=view.inputs(whole, plan)) if passes(plan, len(view.crops)) == [whole] else view

        slots = [one._replace(view=coloured(one.view)) for one in arrived.slots]
        self._prepared = Prepared(arrived.batch, [coloured(view) for view in arrived.queries], slots)

    def wait(self) -> Prepared:
        return self._prepared


def begin_exchange(batch: Batch, plan: Plan, ranks: Ranks, draw: tuple[int, int]) -> UnderWay[Slots]:
    """Begin to bring every rank the key crops of its own slots; draw = (step, direction). Collective."""
    (step, direction), settings = draw, plan.recipe.batch
    perm = permutation(
        plan.recipe.run.seed,
        step,
        plan.groups,
        settings.bn_group_size,
        domain=settings.shuffle_domain_groups,
        direction=direction,
    )
    rows_of_ranks = [rows_of(plan, ranks.world, rank) for rank in range(ranks.world)]
    way, view = route(perm, rows_of_ranks, ranks.rank), VIEWS[direction][1]
    positions = int(batch.positions[0]) - rows_of_ranks[ranks.rank].start + way.rows  # of the rows of the own slots
    arriving = begin_shuffle(batch.crops[:, view], way, ranks)  # N,H,W,3 uint8, of other rows
    return arriving.then(lambda crops: Slots(View(crops, positions, batch.epoch, view), perm))


def _on_device(crops: Tensor, device: torch.device) -> Tensor:
    """To a GPU by way of pinned memory, from which the copy does not make the host wait."""
    if crops.device.type == device.type or device.type != "cuda":
        return crops.to(device)
    return crops.pin_memory().to(device, non_blocking=True)


def _hand_over(prepared: Prepared, stream: "torch.cuda.Stream") -> None:
    """Let the stream that computes go on from what was made on another, and tell the allocator that it uses it."""
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    views = [*prepared.queries, *(one.view for one in prepared.slots)]
    for tensor in [prepared.batch.crops, *(t for v in views for t in (v.crops, v.coloured))]:
        if tensor is not None:
            tensor.record_stream(current)
