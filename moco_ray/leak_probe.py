"""Does batch norm leak? One image of a batch is altered, and it is seen which keys move.

A key depends on the other images only through the statistics of its BatchNorm group. Without the shuffle that group is the query's
own, and a network can tell a pair by the statistics that both share. Needs no training and no threshold: with the balanced shuffle
the rows of one query group that meet in a key group are counted, at most ceil(n / groups shuffled over).
Not responsible for what is said of it (checks/step.py).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moco_ray.ahead import VIEWS
from moco_ray.data.batch import Batch
from moco_ray.method.batchnorm import forget_statistics
from moco_ray.plan import Plan, rows_of
from moco_ray.ranks import Ranks
from moco_ray.train import encode_keys

NOISE_FACTOR = 10  # a key has moved if it is so many times farther off than the same images encoded twice
LEAST_DISTANCE = 1e-6  # of unit keys; an altered image moves its neighbours' by 1e-3 and more


class Leak(NamedTuple):
    """Of the direction that leaks most."""

    moved: int  # keys that differ when one image of the batch is altered, its own with them
    of_own_group: int  # of these, rows of the altered image's query group
    allowed: int  # so many of them meet in one key group after a balanced shuffle
    group_rows: int  # rows that share statistics: more cannot move

    @property
    def leaks(self) -> bool:
        return self.of_own_group > self.allowed

    @property
    def spreads(self) -> bool:
        """Whether keys of another BatchNorm group moved, which nothing explains."""
        return self.moved > self.group_rows


def probe_leak(f_k: nn.Module, batch: Batch, plan: Plan, ranks: Ranks, step: int, row: int = 0) -> Leak:
    """Encode the keys of a batch as in training, and again with the pixels of one row's key view inverted. Collective.

    `batch` holds this rank's rows, and is left as it is; `row` counts over all rows of the batch. Leaves `f_k` as it was. The
    same result on all ranks.
    """
    found = [_moved(f_k, batch, plan, ranks, (step, direction), row) for direction in range(2 if plan.recipe.contrast.symmetric else 1)]
    forget_statistics(f_k)
    settings = plan.recipe.batch
    n, domain = settings.bn_group_size, settings.shuffle_domain_groups or plan.groups
    group = row // n
    own = [int(moved[group * n : (group + 1) * n].sum()) for moved in found]
    worst = max(range(len(found)), key=own.__getitem__)
    return Leak(int(found[worst].sum()), own[worst], math.ceil(n / domain), n)


def _moved(f_k: nn.Module, batch: Batch, plan: Plan, ranks: Ranks, draw: tuple[int, int], row: int) -> Tensor:
    """B bool: the keys that an inverted image of `row` moves."""
    before, again = (encode_keys(f_k, batch, plan, ranks, draw) for _ in range(2))  # twice: a device may not repeat itself to the bit
    after = encode_keys(f_k, _altered(batch, plan, ranks, row, VIEWS[draw[1]][1]), plan, ranks, draw)
    noise = (again - before).abs().amax()
    return (after - before).abs().amax(1) > torch.clamp(NOISE_FACTOR * noise, min=LEAST_DISTANCE)


def _altered(batch: Batch, plan: Plan, ranks: Ranks, row: int, view: int) -> Batch:
    """The batch with one view of one row inverted, on the rank that owns the row."""
    own = rows_of(plan, ranks.world, ranks.rank)
    if row not in own:
        return batch
    crops = batch.crops.clone()  # they may lie in memory that others read
    crops[row - own.start, view] = 255 - crops[row - own.start, view]
    return batch._replace(crops=crops)
