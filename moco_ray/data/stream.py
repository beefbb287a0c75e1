"""The ordered stream of decoded rows: Ray Data tasks in, batches of one rank out.

Responsible for running the tasks of segment.py (and those of the evaluation) as Ray Data pipelines whose blocks
arrive in order, one block a step, and for checking that they do. Not responsible for which rows make a step
(order.py) nor for counting bad rows against their limit (the trainer does).

How Ray 2.60 is used, and why (read in its source, and tried):
- `from_items` of n numbers in n blocks with one `map_batches` is n tasks (`range` would add n tasks of a whole CPU each,
  for it is fused only with tasks of one CPU); `preserve_order` gives their blocks in order though tasks run side by side.
  One rank, one executor.
- A task's yields are gathered until they exceed `target_max_block_size` and cut again at 1.5 times that. At 0.8 of
  a step's bytes each yield is one block, and then a batch is that block in shared memory: no copy, read-only.
- Starting a pipeline costs about 2.5 ms for each task it will ever have, so a run is a chain of pipelines of 256
  tasks; the next one is started while the last tasks of this one are consumed, so that no CPU falls idle.
- Before its first block come new processes, each with 5 s of imports, and a start or restart would wait for them. So the
  rank, which has imported all of that, makes the first segment itself, and more if the pipeline's first block is not
  there then; where CPUs are so few that it has but one task in flight, the pipeline starts behind the first step.
- The executor is a thread of this process. While it holds back a task whose output waits to be taken, its loop spins:
  seen taking 0.6 of a core and the trainer's interpreter with it. A callback makes each turn of the loop pause.
"""

import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import ray
import ray.data
import torch
from ray.exceptions import RayError

from moco_ray.data.batch import BadRow, Batch
from moco_ray.data.decode import BadImage, centre_crop, decode
from moco_ray.data.on_ray import pipeline_name, user_error
from moco_ray.data.segment import Segments, Source, bad_row, segment_steps, side_by_side
from moco_ray.data.shards import ChunkRows, Manifest, read_chunk_rows
from moco_ray.placement import DataPlace
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe

TASKS_PER_PIPELINE = 256
PREFETCH_BLOCKS = 2  # 8 spilled to disk where 2 did not
EVALUATION_TASK_ROWS = 1024
EVALUATION_TASK_CPUS = 0.01  # of the tenth that training's tasks leave
EXECUTOR_PAUSE_SECONDS, HUNGRY_PAUSE_SECONDS = 0.05, 0.005  # while blocks lie ready; while the trainer waits for one

Columns = dict[str, np.ndarray]


def everywhere() -> DataPlace:
    """All CPUs of the Ray that runs."""
    return DataPlace(ray.cluster_resources().get("CPU", 1))


def batches(
    manifest: Manifest,
    recipe: Recipe,
    plan: Plan,
    world: int,
    rank: int,
    start_step: int,
    place: Callable[[], DataPlace] = everywhere,
    head_start: bool = True,
) -> Iterator[Batch]:
    """This rank's rows of the steps start_step .. plan.total_steps-1, in order, one Batch a step.

    Steps count over the whole run; epoch = step // steps_per_epoch. Crops are read-only views of Ray's object store
    where possible: never write into them, and let them go, for they hold its memory. Needs a running Ray. `place()` tells where
    data tasks run and what CPUs all ranks have for them; it is asked anew for each pipeline, so that nodes that came or went
    count. With `head_start` this process makes the first steps itself while they start. Raises UserError if a file cannot
    be read or nothing can replace a bad row, and RuntimeError if rows arrive that the plan does not expect.
    """
    yield from batches_of(Source(manifest, recipe, plan), world, rank, start_step, place, head_start)


def batches_of(
    source: Source, world: int, rank: int, start_step: int, place: Callable[[], DataPlace] = everywhere, head_start: bool = True
) -> Iterator[Batch]:
    """The same of a source, which may be a subset of its data set's rows."""
    plan = source.plan
    plan.refuse_world(world)
    segments = Segments(plan, world, rank, start_step)
    shared = ray.put((source, segments))
    row_bytes = 2 * 3 * source.recipe.augment.image_pixels**2

    def shape() -> Shape:
        found = place()
        return Shape(segments.rows_per_step, row_bytes, *tasks_of_a_rank(found.cpus, world, source.manifest.store.is_local), found.options)

    skipped = 1 if head_start and len(segments) else 0
    own = OwnSteps(_steps_of_all(source, segments), segments[0].steps) if skipped else None
    step = start_step
    for columns in in_order(partial(_segment_task, shared, skipped), len(segments) - skipped, shape, own):
        yield _batch(columns, segments, step)
        step += 1
    if step != max(start_step, plan.total_steps):
        raise RuntimeError(f"the data ended before step {step}: expected steps up to {plan.total_steps - 1}")


class LabelledBatch(NamedTuple):
    """Some rows of a labelled set, in the order asked for; rows that cannot be decoded are left out and listed."""

    crops: torch.Tensor  # N,P,P,3 uint8: the centre crop
    labels: torch.Tensor  # N int64
    rows: torch.Tensor  # N int64: numbers of the rows in the manifest
    bad: tuple[BadRow, ...]  # rows left out; `position` is their place in `row_numbers`


def labelled_images(
    manifest: Manifest, recipe: Recipe, row_numbers: np.ndarray, batch_rows: int, ranks: int = 1
) -> Iterator[LabelledBatch]:
    """The given rows (M,) of an evaluation set, resized, centre-cropped and labelled as recipe.evaluation says.

    Comes in the order of `row_numbers`, `batch_rows` rows at a time, less the bad ones (a batch may be empty). Rising
    row numbers read each chunk once or twice; a shuffled order reads a row group again in every task that needs it.
    Without a label column all labels are 0. `ranks` call this side by side, each for its own rows. Labels of a tree number its own class folders: compare
    `Manifest.classes` before labels of two sets are compared. Raises UserError if a file cannot be read or has no such labels.
    """
    row_numbers = np.asarray(row_numbers, np.int64)
    task_rows = batch_rows * max(1, EVALUATION_TASK_ROWS // batch_rows)
    shared = ray.put((manifest, recipe, row_numbers))
    work = partial(_labelled_task, shared, task_rows, batch_rows)
    parallel = max(1, int(ray.cluster_resources().get("CPU", 1) / ranks))
    seen, shape = 0, Shape(batch_rows, 3 * recipe.augment.image_pixels**2, parallel, EVALUATION_TASK_CPUS)
    for columns in in_order(work, -(-len(row_numbers) // task_rows), lambda: shape):
        _refuse_other(seen, np.arange(seen, min(seen + batch_rows, len(row_numbers))), columns["position"])
        seen += len(columns["position"])
        bad, good = _bad_rows(columns["bad"]), columns["bad"] == ""
        if bad:
            columns = {name: values[good] for name, values in columns.items()}
        yield LabelledBatch(*(_tensor(columns[name]) for name in ("crops", "label", "row")), bad)


def _steps_of_all(source: Source, segments: Segments) -> Iterator[Columns]:
    for index in range(len(segments)):
        yield from segment_steps(source, segments.groups, segments[index])


def _segment_task(shared: ray.ObjectRef, skipped: int, task: int) -> Iterator[Columns]:
    source, segments = ray.get(shared)
    yield from segment_steps(source, segments.groups, segments[skipped + task])


def _labelled_task(shared: ray.ObjectRef, task_rows: int, batch_rows: int, task: int) -> Iterator[Columns]:
    manifest, recipe, row_numbers = ray.get(shared)
    stop = min((task + 1) * task_rows, len(row_numbers))
    for first in range(task * task_rows, stop, batch_rows):
        yield labelled_rows(manifest, recipe, row_numbers, np.arange(first, min(first + batch_rows, stop)))


def labelled_rows(manifest: Manifest, recipe: Recipe, row_numbers: np.ndarray, positions: np.ndarray) -> Columns:
    """The rows row_numbers[positions] as one block; "bad" is "" or why it could not be decoded, as JSON. Needs no Ray."""
    pixels, rows = recipe.augment.image_pixels, row_numbers[positions]
    crops = np.zeros((len(rows), pixels, pixels, 3), np.uint8)
    labels, bad = np.zeros(len(rows), np.int64), [""] * len(rows)
    chunks, inner = manifest.locate(rows)
    wanted = [(chunk, np.flatnonzero(chunks == chunk)) for chunk in np.unique(chunks).tolist()]

    def read(chunk: int, places: np.ndarray) -> ChunkRows:
        return read_chunk_rows(manifest, chunk, inner[places], recipe.evaluation.label_column)

    for (_, places), found in zip(wanted, side_by_side(read, manifest, wanted), strict=True):
        if found.labels is not None:
            labels[places] = found.labels
        for place, encoded in zip(places.tolist(), found.encoded, strict=True):
            try:
                image = decode(encoded, recipe.data.max_image_pixels)
            except BadImage as error:
                bad[place] = json.dumps(bad_row(manifest, int(positions[place]), int(rows[place]), error))
            else:
                crops[place] = centre_crop(image, recipe.evaluation.resize_pixels, pixels)
    return {"crops": crops, "label": labels, "row": rows, "position": positions, "bad": np.array(bad)}


def _batch(columns: Columns, segments: Segments, step: int) -> Batch:
    epoch, step_in_epoch = divmod(step, segments.plan.steps_per_epoch)
    batch = segments.plan.recipe.batch
    first = step_in_epoch * batch.global_batch_size + segments.groups.start * batch.bn_group_size
    _refuse_other(step, np.full(segments.rows_per_step, step), columns["step"])
    _refuse_other(step, np.arange(first, first + segments.rows_per_step), columns["position"])
    crops, positions, rows = (_tensor(columns[name]) for name in ("crops", "position", "row"))
    return Batch(epoch, crops, positions, rows, _bad_rows(columns["bad"]), _tensor(columns["content"]))


def _refuse_other(step: int, expected: np.ndarray, got: np.ndarray) -> None:
    if not np.array_equal(expected, got):
        raise RuntimeError(
            f"rows out of order at step {step}: expected {len(expected)} rows from {expected[:1]} to {expected[-1:]}, "
            f"got {len(got)} rows: {got[:8]}..."
        )


def _bad_rows(column: np.ndarray) -> tuple[BadRow, ...]:
    return tuple(BadRow(*json.loads(text)) for text in column.tolist() if text)


def _tensor(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # a block in shared memory
        return torch.from_numpy(array)


class Shape(NamedTuple):
    """Of one pipeline."""

    block_rows: int
    row_bytes: int
    tasks_in_flight: int
    task_cpus: float  # that a task claims
    options: dict[str, Any] = {}  # of Ray, for its tasks

    @property
    def bytes(self) -> int:
        return self.block_rows * self.row_bytes

    @property
    def bytes_held(self) -> int:
        """What a pipeline aims to keep in the object store; more, and memory grows with what is to come.

        Fewer blocks slow it down: in one run with 2 tasks, 2 blocks cost a fifth of the rate, 8 cost nothing. The store
        holds up to 10 for each task in flight in any case (see Plan.object_store_bytes).
        """
        return (4 + 4 * self.tasks_in_flight) * self.bytes


def tasks_of_a_rank(data_cpus: float, ranks: int, is_local: bool) -> tuple[int, float]:
    """How many tasks of a rank are in flight, and the CPUs that each claims, when all ranks share `data_cpus`.

    As many as the rank's CPUs (one more takes more by switching than it fills gaps); a task from object storage first waits
    for its bytes: twice as many.

    A task that has made more than is taken pauses and keeps its claim. So the claims of all tasks that may ever be in
    flight (of all ranks, each with the next pipeline already begun) must fit at once: otherwise paused tasks of one rank
    would keep a CPU from the task of another, for whose step they wait. Hence half a claim, and a tenth left for
    evaluations, which run while training's tasks pause.
    """
    share, per_cpu = data_cpus / ranks, 1 if is_local else 2
    return max(1, int(share * per_cpu)), 0.45 / max(per_cpu, math.ceil(1 / share))  # whole numbers of them fill a CPU


class OwnSteps(NamedTuple):
    """All steps, as this process can make them while tasks start; the tasks begin behind the first `ahead`."""

    steps: Iterable[Columns]
    ahead: int


def in_order(
    work: Callable[[int], Iterator[Columns]], tasks: int, shape: Callable[[], Shape], own: OwnSteps | None = None
) -> Iterator[Columns]:
    """The columns that work(0), work(1), .. work(tasks-1) yield, in this order, `block_rows` rows at a time.

    All that a task yields has as many rows, except the very last. Before them come those of `own`. `shape()` is asked for each
    pipeline; all have the same blocks. Raises the UserError that a task raised.
    """
    starts = range(0, tasks, TASKS_PER_PIPELINE)

    def part_of(index: int) -> range:
        return range(starts[index], min(starts[index] + TASKS_PER_PIPELINE, tasks))

    def start(part: range) -> tuple[int, Iterator[Columns]]:
        found = shape()
        return found.tasks_in_flight, _start_pipeline(work, found, part)

    with ThreadPoolExecutor(1, "next-pipeline") as thread:
        at_once = own is None or shape().tasks_in_flight > 1
        following: Future | None = thread.submit(start, part_of(0)) if starts and at_once else None
        try:
            again = 0  # steps that were made here, and are made by the tasks too
            if own is not None:
                for made, columns in enumerate(own.steps, 1):
                    yield columns
                    if starts and following is None:
                        following = thread.submit(start, part_of(0))
                    if starts and following.done() and made >= own.ahead:
                        break
                else:
                    return
                again = made - own.ahead
            for index in range(len(starts)):
                part = part_of(index)
                (in_flight, blocks), following = following.result(), None
                for columns in blocks:
                    late = columns["task"][0] >= part.stop - in_flight  # all of this one are at work
                    if late and following is None and index + 1 < len(starts):
                        following = thread.submit(start, part_of(index + 1))
                    if again > 0:
                        again -= 1
                        continue
                    yield columns
        except RayError as error:
            if (mistake := user_error(error)) is not None:
                raise mistake from None
            raise


class _Pause:
    """Ray Data's execution callback (its four methods): a breath in each turn of the executor's loop.

    A short one while somebody waits: a task makes two blocks ahead and then waits for the loop to take them, so a long
    one would hold the tasks of small steps up.
    """

    def before_execution_starts(self, executor) -> None: ...

    def on_execution_step(self, executor) -> None:
        _, state = executor._output_node
        time.sleep(HUNGRY_PAUSE_SECONDS if state.num_waiting_consumers else EXECUTOR_PAUSE_SECONDS)

    def after_execution_succeeds(self, executor) -> None: ...

    def after_execution_fails(self, executor, error) -> None: ...


def _start_pipeline(work: Callable, shape: Shape, part: range) -> Iterator[Columns]:
    """Start one pipeline over a run of tasks and wait for its first block."""

    def run_tasks(block: Columns) -> Iterator[Columns]:
        for number in block["id"].tolist():
            for columns in work(number):
                yield columns | {"task": np.full(len(columns["crops"]), number)}

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what matters is raised; a run prints its own progress
    compute = ray.data.TaskPoolStrategy(size=min(shape.tasks_in_flight, len(part)))
    numbers = ray.data.from_items([{"id": number} for number in part], override_num_blocks=len(part))
    tasks = numbers.map_batches(run_tasks, batch_size=None, num_cpus=shape.task_cpus, compute=compute, **shape.options)
    tasks.set_name(pipeline_name())
    context = tasks.context
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(
        object_store_memory=shape.bytes_held
    )
    context.custom_execution_callback_classes = [_Pause]
    context.target_max_block_size = int(0.8 * shape.bytes)
    batches = tasks.iter_batches(batch_size=shape.block_rows, batch_format="numpy", prefetch_batches=PREFETCH_BLOCKS)
    blocks = iter(batches)
    return chain([next(blocks)], blocks)
