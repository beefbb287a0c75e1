"""The work of one data task: the rows of a segment, read, decoded and cropped, step by step.

A segment is a run of steps of one rank's BN groups: whole windows of the order (see order.py), so that each chunk
piece is read once, within one epoch. Responsible for cutting a run into segments and for replacing rows that cannot
be decoded. Knows no Ray: stream.py carries the tasks.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from moco_ray.data.batch import BadRow
from moco_ray.data.decode import CROP_DRAWS, BadImage, decode, two_crops
from moco_ray.data.draws import CROP, REPLACE, uniforms
from moco_ray.data.order import EpochOrder
from moco_ray.data.shards import Manifest, read_chunk_rows
from moco_ray.data.subset import Subset, SubsetOrder
from moco_ray.errors import UserError
from moco_ray.plan import Plan, groups_of_rank
from moco_ray.recipe import Recipe

READ_THREADS = 16  # of a task: a range read from object storage is mostly waiting
READ_BYTES = 256 << 20  # of row groups in flight, unless a single one is larger
TASK_BYTES = 64 << 20  # decoded crops that a task aims at, between the two bounds below
LEAST_TASK_ROWS, MOST_TASK_ROWS = 256, 4096  # a task costs about 30 ms to schedule; a window may hold more rows


HASHED_ROWS = 65536  # images of a data set whose bytes are compared with each other's, about
HASHED_EPOCHS = 10  # of which one hashes them: a hash of 108 KB costs 0.10 ms of the 2.5 ms that an image does, and tells nothing new

T = TypeVar("T")


class Segment(NamedTuple):
    """Steps first_step .. stop_step-1 of an epoch, counted within it."""

    epoch: int
    first_step: int
    stop_step: int

    @property
    def steps(self) -> int:
        return self.stop_step - self.first_step


@dataclass(frozen=True)
class Segments:
    """The remaining steps of a run, as one rank cuts them into tasks. Arithmetic: nothing is listed."""

    plan: Plan
    world: int
    rank: int
    start_step: int  # over the whole run; the first segment may start in the middle of a window

    @property
    def groups(self) -> range:
        """The BN groups of the rank."""
        return groups_of_rank(self.plan.groups, self.world, self.rank)

    @property
    def rows_per_step(self) -> int:
        return len(self.groups) * self.plan.recipe.batch.bn_group_size

    @property
    def steps_per_segment(self) -> int:
        """Whole windows with about TASK_BYTES of crops and 256 to 4096 rows; at least one window."""
        row_bytes = 2 * 3 * self.plan.recipe.augment.image_pixels**2
        rows = min(max(TASK_BYTES // row_bytes, LEAST_TASK_ROWS), MOST_TASK_ROWS)
        window_rows = self.plan.window_steps * self.rows_per_step
        return self.plan.window_steps * max(1, rows // window_rows)

    @property
    def segments_per_epoch(self) -> int:
        return -(-self.plan.steps_per_epoch // self.steps_per_segment)

    def _number(self, step: int) -> int:
        """The segment that holds a step, counted from the beginning of the run."""
        epoch, step_in_epoch = divmod(step, self.plan.steps_per_epoch)
        return epoch * self.segments_per_epoch + step_in_epoch // self.steps_per_segment

    def __len__(self) -> int:
        if self.start_step >= self.plan.total_steps:
            return 0
        return self._number(self.plan.total_steps - 1) - self._number(self.start_step) + 1

    def __getitem__(self, index: int) -> Segment:
        if not 0 <= index < len(self):
            raise IndexError(f"segment {index} of {len(self)}")
        epoch, number = divmod(self._number(self.start_step) + index, self.segments_per_epoch)
        before = epoch * self.plan.steps_per_epoch
        first, stop = number * self.steps_per_segment, (number + 1) * self.steps_per_segment
        return Segment(
            epoch,
            max(first, self.start_step - before),
            min(stop, self.plan.steps_per_epoch, self.plan.total_steps - before),
        )


@dataclass(frozen=True)
class Source:
    """What all tasks of a run share: where rows lie, and how they are ordered, decoded and cropped."""

    manifest: Manifest
    recipe: Recipe
    plan: Plan
    subset: Subset | None = None  # None: all rows

    def order(self, epoch: int) -> EpochOrder | SubsetOrder:
        """The order of an epoch, kept for the next task of this process."""
        return _order(self.manifest, self.plan, self.recipe.run.seed, epoch, self.subset)


@lru_cache(maxsize=2)
def _order(manifest: Manifest, plan: Plan, seed: int, epoch: int, subset: Subset | None) -> EpochOrder | SubsetOrder:
    if subset is not None:
        return SubsetOrder(manifest, subset, plan, seed, epoch)
    return EpochOrder(manifest.chunk_rows, plan, seed, epoch)


def segment_steps(source: Source, groups: range, segment: Segment) -> Iterator[dict[str, np.ndarray]]:
    """Read a segment's rows once, then decode and crop one step after the other.

    Yields for each step, N rows in the order of Batch: `crops` (N,2,P,P,3) uint8, `position` (N,) int64, `row` (N,)
    int64 (after replacement), `step` (N,) int64 over the run, `bad` (N,) str: JSON of the BadRow that was replaced,
    or "", `content` (N,) int64 (see content_of; 0 in nine of ten epochs). Raises UserError if a file cannot be read, or if no row of a bad row's window can be decoded.
    """
    order = source.order(segment.epoch)
    steps = range(segment.first_step, segment.stop_step)
    by_group = [[order.rows_of(step, group) for step in steps] for group in groups]  # a group's window stays cached
    encoded = read_rows(source.manifest, np.concatenate([rows for stream in by_group for rows in stream]))
    one_of = max(1, source.plan.rows // HASHED_ROWS) if segment.epoch % HASHED_EPOCHS == 0 else 0
    for index, step in enumerate(steps):
        rows = np.concatenate([stream[index] for stream in by_group])
        positions = np.concatenate([order.positions_of(step, group) for group in groups])
        images = [encoded.pop(row) for row in rows.tolist()]  # rows are given once an epoch: freed as they are used
        crops, used, bad = _crop_rows(source, segment.epoch, positions, rows, images)
        hashed = [content_of(image, one_of) if one_of and not text else 0 for image, text in zip(images, bad, strict=True)]
        steps_before = segment.epoch * source.plan.steps_per_epoch
        step_of_run = np.full(len(rows), steps_before + step)
        yield {"crops": crops, "position": positions, "row": used, "step": step_of_run, "bad": bad, "content": np.array(hashed, np.int64)}


def content_of(image: bytes, one_of: int) -> int:
    """A hash of an encoded image for one in `one_of` images, never 0; 0 for the others. Equal bytes, equal answer.

    Whether an image is of the sample is told by its last bytes, so that the others cost nothing.
    """
    if zlib.crc32(image[-1024:]) % one_of:
        return 0
    return int.from_bytes(hashlib.blake2b(image, digest_size=8).digest()) >> 1 or 1


def read_rows(manifest: Manifest, rows: np.ndarray) -> dict[int, bytes]:
    """The encoded images of rows (N,) int64, each chunk read once, several at a time.

    Raises UserError naming a file that fails.
    """
    rows = np.unique(rows)
    chunks, inner = manifest.locate(rows)

    def read(chunk: int, first: int, stop: int) -> list[bytes]:
        return read_chunk_rows(manifest, chunk, inner[first:stop]).encoded

    parts = side_by_side(read, manifest, list(zip(*_runs(chunks), strict=True)))
    return dict(zip(rows.tolist(), chain.from_iterable(parts), strict=True))


def side_by_side(read: Callable[..., T], manifest: Manifest, wanted: list[tuple]) -> list[T]:
    """read(*one) of each, in order; the first of each names a chunk, whose sizes bound how many are read at once."""
    largest = int(manifest.chunk_bytes[[one[0] for one in wanted]].max(initial=1))
    with ThreadPoolExecutor(min(READ_THREADS, max(1, READ_BYTES // largest))) as threads:
        try:
            return list(threads.map(lambda one: read(*one), wanted))
        finally:
            threads.shutdown(cancel_futures=True)  # after an error nobody waits for the rest


def _runs(chunks: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """Chunk, first and stop index of each run of equal chunks."""
    cuts = np.flatnonzero(np.diff(chunks, prepend=-1))
    return chunks[cuts].tolist(), cuts.tolist(), [*cuts[1:].tolist(), len(chunks)][: len(cuts)]


@torch.inference_mode()  # there are no gradients here, and every operator is a few microseconds cheaper
def _crop_rows(source: Source, epoch: int, positions: np.ndarray, rows: np.ndarray, images: list[bytes]):
    """Crops (N,2,P,P,3) uint8, the rows used (N,) int64 and the bad rows as JSON (N,) str of one step."""
    recipe, pixels = source.recipe, source.recipe.augment.image_pixels
    views = [uniforms(recipe.run.seed, epoch, positions, view, CROP, CROP_DRAWS) for view in (0, 1)]
    draws = np.stack(views, axis=1)  # N,2,CROP_DRAWS: keyed by position, so a replacement is cropped by them too
    crops = np.empty((len(rows), 2, pixels, pixels, 3), np.uint8)
    used, bad = rows.copy(), [""] * len(rows)
    for index, (position, row) in enumerate(zip(positions.tolist(), rows.tolist(), strict=True)):
        try:
            image = decode(images[index], recipe.data.max_image_pixels)
        except BadImage as error:
            bad[index] = json.dumps(bad_row(source.manifest, position, row, error))
            used[index], image = _replacement(source, epoch, position, row)
        two_crops(image, draws[index], recipe.augment, crops[index])
    return crops, used, np.array(bad)


def bad_row(manifest: Manifest, position: int, row: int, error: BadImage) -> BadRow:
    """A row that failed to decode, as it is listed."""
    return BadRow(position, row, error.kind, manifest.source(row), error.message)


def _replacement(source: Source, epoch: int, position: int, row: int):
    """Another row of the same window of the same stream, and its decoded image.

    The candidates' order is drawn from (seed, epoch, position), and the whole window is drawn from even if a resumed
    segment needs only part of it: the choice depends neither on the world size nor on where a run was interrupted.
    """
    order, batch = source.order(epoch), source.recipe.batch
    step, place = divmod(position, batch.global_batch_size)
    window = order.window_rows(place // batch.bn_group_size, order.window_of(step))
    draws = uniforms(source.recipe.run.seed, epoch, np.array([position]), 0, REPLACE, len(window))[0]
    for candidate in window[np.argsort(draws, kind="stable")].tolist():
        if candidate == row:
            continue
        try:
            encoded = read_rows(source.manifest, np.array([candidate]))[candidate]
            return candidate, decode(encoded, source.recipe.data.max_image_pixels)
        except BadImage:
            continue  # listed where it has its own turn
    raise UserError(
        f"none of the {len(window)} rows around {source.manifest.source(row)} can be decoded, so nothing can replace "
        f"it; check that the data set holds images and that data.max_image_pixels is not too small"
    )
