"""What reading a data set in the order of a plan will cost: bytes, requests, memory. Arithmetic: nothing is opened.

Responsible for the figures that `show-plan` prints of the data plane. Not responsible for the reading (segment.py).
"""

from typing import NamedTuple

import numpy as np

from moco_ray.data.order import EpochOrder
from moco_ray.data.segment import Segment, Segments
from moco_ray.data.shards import Manifest
from moco_ray.plan import Plan, groups_of_rank

SAMPLED_SEGMENTS = 64  # of epoch 0, spread over it and over the ranks


class Reading(NamedTuple):
    """Of one epoch by `world` ranks. Means over the sampled segments."""

    segments_per_rank: int
    steps_per_segment: int
    amplification: float  # bytes read for each byte of an image that is used; 1 where every chunk is used whole
    chunks_per_segment: float
    bytes_per_segment: float  # encoded, held by a data task
    bytes_per_step: float  # encoded, read by all ranks


class Opened(NamedTuple):
    """What a rank reads first."""

    chunks: int
    files: tuple[str, ...]
    bytes: int


def reading(manifest: Manifest, plan: Plan, world: int) -> Reading:
    """The figures of epoch 0, from up to 64 of its segments."""
    order = EpochOrder(manifest.chunk_rows, plan, plan.recipe.run.seed, 0)
    segments = Segments(plan, world, 0, 0)
    steps, per_epoch = segments.steps_per_segment, segments.segments_per_epoch
    everything = [(rank, index) for rank in range(world) for index in range(per_epoch)]
    picked = np.unique(np.linspace(0, len(everything) - 1, SAMPLED_SEGMENTS).astype(int))
    read, used, chunks, step_count = 0.0, 0.0, 0, 0
    for rank, index in (everything[place] for place in picked):
        segment = Segment(0, index * steps, min((index + 1) * steps, plan.steps_per_epoch))
        touched, counts = _chunks(manifest, order, groups_of_rank(plan.groups, world, rank), segment)
        read += float(manifest.chunk_bytes[touched].sum())
        used += float((manifest.chunk_bytes[touched] * counts / manifest.chunk_rows[touched]).sum())
        chunks += len(touched)
        step_count += segment.steps
    return Reading(
        per_epoch, steps, read / max(used, 1), chunks / len(picked), read / len(picked), world * read / step_count
    )


def opened_at(manifest: Manifest, plan: Plan, world: int, rank: int, step: int) -> Opened:
    """What a rank reads first when the run starts or resumes at `step`: the rest of the segment that holds it."""
    segment = Segments(plan, world, rank, step)[0]
    order = EpochOrder(manifest.chunk_rows, plan, plan.recipe.run.seed, segment.epoch)
    touched, _ = _chunks(manifest, order, groups_of_rank(plan.groups, world, rank), segment)
    names = manifest.names.take(np.unique(manifest.file[touched])).to_pylist()
    return Opened(len(touched), tuple(names), int(manifest.chunk_bytes[touched].sum()))


def _chunks(manifest: Manifest, order: EpochOrder, groups: range, segment: Segment) -> tuple[np.ndarray, np.ndarray]:
    """The chunks that a segment reads, and how many rows of each."""
    steps = range(segment.first_step, segment.stop_step)
    rows = np.concatenate([order.rows_of(step, group) for group in groups for step in steps])
    return np.unique(manifest.locate(rows)[0], return_counts=True)
