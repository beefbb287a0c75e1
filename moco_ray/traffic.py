"""What a step sends, and how long collectives take that a step hides or does not: arithmetic for scaling.py.

Responsible for the bytes of each rank and node, as train.py, ranks.py and method/shuffle.py really send them, for DDP's buckets, and
for the time of rings. Not responsible for the step as a whole. Pure: no torch, no Ray.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moco_ray.cluster_facts import ClusterFacts
from moco_ray.plan import Plan, groups_of_rank, passes, rows_of

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's own


@dataclass(frozen=True)
class Load:
    """What a step of a recipe computes and sends, on any cluster."""

    plan: Plan
    gradients: tuple[int, ...]  # bytes of each parameter's gradient, in the model's order

    @property
    def directions(self) -> int:
        return 2 if self.plan.recipe.contrast.symmetric else 1

    @property
    def crop_bytes(self) -> int:
        """Of one view of a row, uint8."""
        return 3 * self.plan.recipe.augment.image_pixels**2

    @property
    def key_bytes(self) -> int:
        recipe = self.plan.recipe.encoder
        return recipe.feature_dim * (8 if recipe.precision == "float64" else 4)

    @property
    def gradient_wire(self) -> float:
        """Bytes that travel for a byte of gradient."""
        return 0.5 if self.plan.recipe.optimizer.gradient_reduction == "bfloat16" else 1.0

    @property
    def reduced_bytes(self) -> float:
        """Of gradients, as they are all-reduced."""
        return sum(self.gradients) * self.gradient_wire

    @property
    def checkpoint_bytes(self) -> int:
        return self.plan.checkpoint_bytes(sum(self.gradients) // (8 if self.plan.recipe.encoder.precision == "float64" else 4))


class Ring(NamedTuple):
    """Ranks of one collective, and the slowest link between neighbours."""

    world: int
    bytes_per_second: float
    latency_seconds: float

    def gather_seconds(self, bytes_of_each: float) -> float:
        """All-gather in a ring: each passes on the others'."""
        return (self.world - 1) * (self.latency_seconds + bytes_of_each / self.bytes_per_second)

    def reduce_seconds(self, size: float) -> float:
        """All-reduce of so many bytes: twice round a ring for the bytes, a tree's depth for the latency, as NCCL chooses."""
        return 2 * math.ceil(math.log2(self.world)) * self.latency_seconds + sent_by_all_reduce(size, self.world) / self.bytes_per_second


def sent_by_all_reduce(size: float, world: int) -> float:
    """Bytes that each rank of a ring sends, and receives."""
    return 2 * (world - 1) / world * size


def buckets(gradients: Sequence[int]) -> list[int]:
    """Bytes of DDP's buckets in the order they are sent: gradients come from the last layer on; a bucket closes at its limit."""
    found, filled = [], 0
    for size in reversed(gradients):
        filled += size
        if filled >= (BUCKET_BYTES if found else FIRST_BUCKET_BYTES):
            found.append(filled)
            filled = 0
    return found + [filled] if filled else found


def unhidden(sizes: Sequence[float], ring: Ring, backward_seconds: float) -> float:
    """Seconds that the all-reduces of these buckets go on after the backward.

    Gradients come evenly over the backward, by bytes. That is pessimistic for a ResNet: its last layers, whose gradients come
    first, have most parameters and little work.
    """
    done, ready = 0.0, 0.0
    for size in sizes:
        ready += size
        done = max(done, backward_seconds * ready / sum(sizes)) + ring.reduce_seconds(size)
    return max(0.0, done - backward_seconds)


def rows_leaving(plan: Plan, groups: range) -> float:
    """Mean rows of these consecutive groups that a step's shuffle sends to other groups than these, for one direction.

    The permutation is balanced: a group has as many rows from each group of its domain.
    """
    n, size = plan.recipe.batch.bn_group_size, plan.recipe.batch.shuffle_domain_groups or plan.groups
    leaving = 0.0
    for domain in range(groups.start // size, math.ceil(groups.stop / size)):
        inside = min(groups.stop, (domain + 1) * size) - max(groups.start, domain * size)
        leaving += inside * n * (1 - inside / size)
    return leaving


def groups_of_ranks(plan: Plan, world: int, first: int, count: int) -> range:
    """The run of groups that `count` ranks own together."""
    return range(groups_of_rank(plan.groups, world, first).start, groups_of_rank(plan.groups, world, first + count - 1).stop)


@dataclass(frozen=True)
class Placed:
    """A load dealt out over the GPUs of a cluster: bytes of the busiest rank and node, whatever the time they take."""

    load: Load
    facts: ClusterFacts
    world: int

    def __post_init__(self):
        self.load.plan.refuse_world(self.world)

    @property
    def nodes(self) -> int:
        return math.ceil(self.world / self.facts.node.gpus)

    @property
    def ranks_of_node(self) -> int:
        return min(self.world, self.facts.node.gpus)

    @property
    def rows(self) -> int:
        """Of the rank that has most."""
        return len(rows_of(self.load.plan, self.world, 0))

    @property
    def rows_of_passes(self) -> list[int]:
        """Of that rank, in each forward pass."""
        return [each.stop - each.start for each in passes(self.load.plan, self.rows)]

    @property
    def rows_of_node(self) -> int:
        return len(groups_of_ranks(self.load.plan, self.world, 0, self.ranks_of_node)) * self.load.plan.recipe.batch.bn_group_size

    @functools.cached_property
    def crops_leaving_rank(self) -> float:
        """Bytes that the busiest rank sends to others in a step's shuffles."""
        return self._crops_leaving(1)

    @functools.cached_property
    def crops_leaving_node(self) -> float:
        return self._crops_leaving(self.ranks_of_node)

    def _crops_leaving(self, ranks: int) -> float:
        """Of the busiest of all runs of so many ranks."""
        starts = range(0, self.world, ranks)
        runs = (groups_of_ranks(self.load.plan, self.world, first, min(ranks, self.world - first)) for first in starts)
        return self.load.directions * self.load.crop_bytes * max(rows_leaving(self.load.plan, run) for run in runs)

    def collective_bytes_of_node(self) -> float:
        """Bytes that the busiest node receives in a step by collectives, of its network."""
        if self.nodes == 1:
            return 0.0
        keys = (self.world - 1) * self.rows * self.load.key_bytes * self.load.directions
        return self.crops_leaving_node + keys + sent_by_all_reduce(self.load.reduced_bytes, self.world)

    def partners(self) -> int:
        """Other ranks with which the busiest one exchanges rows."""
        size = self.load.plan.recipe.batch.shuffle_domain_groups or self.load.plan.groups
        return min(self.world - 1, math.ceil(size * self.world / self.load.plan.groups), self.rows)
