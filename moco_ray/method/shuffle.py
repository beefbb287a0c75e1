"""ShuffleBN: encode keys in a batch shuffled across ranks, then put them back (He et al. 2019, section 3.3).

A query's BatchNorm group must not be its key's, or the network recognises a pair by its shared
statistics. The permutation is known to every rank, so nothing is broadcast; images move as uint8 crops
by one all-to-all, and one gather of the keys serves both the way back and the queue. The released code
gathers all images of all ranks in float.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moco_ray.ranks import Ranks, UnderWay

_TAG = 0x5B  # keeps these draws apart from the other uses of (seed, step)


def permutation(
    seed: int, step: int, groups: int, rows_per_group: int, *, domain: int = 0, direction: int = 0
) -> Tensor:
    """Row of the batch that each key slot encodes: (B,) int64, slot g·n..(g+1)·n being key group g.

    Balanced: every pair of groups exchanges floor or ceil(n/G) rows, which leaks least (the statistics of a
    query's and its key's group correlate by exactly 1/G when G divides n; a uniform permutation is a little
    worse). `domain` confines it to consecutive runs of so many groups (0: all). `direction` tells the two
    draws of a symmetric step apart. Drawn from (seed, step, direction) alone.
    """
    size = domain or groups
    draw = np.random.default_rng([_TAG, seed, step, direction])
    runs = [_balanced(draw, size, rows_per_group) + start * rows_per_group for start in range(0, groups, size)]
    return torch.from_numpy(np.concatenate(runs))


def _balanced(draw: np.random.Generator, groups: int, n: int) -> np.ndarray:
    """Each lane (place in a group) is a bijection of groups, so a pair meets in floor or ceil(n/G) lanes."""
    local = draw.permuted(np.tile(np.arange(n), (groups, 1)), axis=1)  # G,n: lane j of group g holds row local[g,j]
    order = draw.permutation(groups)
    inverse = np.argsort(order)
    lane = (np.arange(n) + draw.integers(groups)) % groups
    source = inverse[(order[:, None] - lane[None]) % groups]  # G,n: group that lane j of key group g comes from
    return (source * n + local[source, np.arange(n)[None]]).reshape(-1)


def unshuffle(keys: Tensor, perm: Tensor) -> Tensor:
    """Keys in slot order (B,C) -> keys in row order (B,C)."""
    rows = torch.empty_like(keys)
    rows[perm.to(keys.device)] = keys
    return rows


@dataclass(frozen=True)
class Route:
    """What one rank sends and receives so that it holds the rows of its own slots, in slot order."""

    send_rows: Tensor  # own rows (local index), by destination rank
    send_counts: list[int]
    receive_counts: list[int]
    arrival: Tensor  # arrived row of each own slot
    rows: Tensor  # batch row of each own slot


def route(perm: Tensor, rows_of_ranks: list[range], rank: int) -> Route:
    """The exchange of `perm` for `rank`, when rank r owns the batch rows and key slots rows_of_ranks[r]."""
    starts = torch.tensor([rows.start for rows in rows_of_ranks])
    owner = torch.searchsorted(starts, torch.arange(len(perm)), right=True) - 1  # B: rank of a row, and of a slot
    mine, world = rows_of_ranks[rank], len(rows_of_ranks)
    slots = torch.arange(len(perm))
    leaving = slots[owner[perm] == rank]  # rising slots, so already by destination
    own = perm[mine.start : mine.stop]
    by_source = torch.argsort(owner[own], stable=True)  # a source sends in the order of the slots
    return Route(
        send_rows=perm[leaving] - mine.start,
        send_counts=torch.bincount(owner[leaving], minlength=world).tolist(),
        receive_counts=torch.bincount(owner[own], minlength=world).tolist(),
        arrival=torch.argsort(by_source),
        rows=own,
    )


def begin_shuffle(rows: Tensor, way: Route, ranks: Ranks) -> UnderWay[Tensor]:
    """Own rows (N,...) in -> under way: the rows of the own key slots (N,...), in slot order."""
    leaving = rows[way.send_rows.to(rows.device)]
    arriving = ranks.begin_exchange(leaving, way.send_counts, way.receive_counts)
    return arriving.then(lambda arrived: arrived[way.arrival.to(rows.device)])
