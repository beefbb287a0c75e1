"""Small runs that are ill on purpose, and healthy ones: what the verdicts are judged by.

The generated set and a ResNet-10, as in test_learning.py; each run takes half a minute on two idle cores. As a program it
runs all of them and prints which verdict was raised by which run, and at which step: `python -m tests.ill_runs [NAME ..]`.
"""

import contextlib
import itertools
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from moco_ray.data.batch import Batch
from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.data.segment import Segments, Source, segment_steps
from moco_ray.data.survey import build_manifest
from moco_ray.data.whereabouts import rows_of_slots
from moco_ray.errors import NonFinite
from moco_ray.learner import Learner
from moco_ray.meter import Meter
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.train import Outputs, train
from moco_ray.verdicts import judge

STEPS, ROWS, FEW_ROWS = 250, 8000, 400
VALUES = {
    "encoder": {"backbone": "resnet10", "stem": "imagenet", "feature_dim": 64},
    "contrast": {"temperature": 0.1, "queue_keys": 1024, "key_momentum": 0.99},
    "batch": {"global_batch_size": 64, "bn_group_size": 8},
    "optimizer": {"learning_rate": 0.03},
    "schedule": {"steps": STEPS, "warmup_steps": 20},
    "augment": {
        "image_pixels": 32, "crop_scale": [0.4, 1.0], "jitter": [0.4, 0.4, 0.0, 0.0], "grayscale_probability": 0.0,
        "blur_probability": 0.0, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25],
    },
    "run": {"checkpoint_every_steps": 10_000},
}  # fmt: skip


class Case(NamedTuple):
    """A run: the verdict that it must raise and the step by which it must (0: none), what is changed in VALUES, and what is broken."""

    verdict: str = ""
    by_step: int = 0
    changes: dict[str, dict[str, Any]] = {}
    data: str = "plain"
    broken: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    pace: float = 0.0  # seconds that the input takes for a step
    steps: int = STEPS  # of the run


def no_shuffle():
    return mock.patch("moco_ray.ahead.permutation", lambda seed, step, groups, n, **_: torch.arange(groups * n))


CASES = {
    **{f"healthy, seed {seed}": Case(changes={"run": {"seed": seed}}) for seed in range(5)},
    "healthy, groups of 4": Case(changes={"batch": {"bn_group_size": 4}}),
    "m = 0.9": Case("stale_dictionary", 60, {"contrast": {"key_momentum": 0.9}}),
    "m = 0": Case("stale_dictionary", 60, {"contrast": {"key_momentum": 0.0}}),
    "m = 1": Case("key_encoder_frozen", 60, {"contrast": {"key_momentum": 1.0}}),
    "no shuffle, groups of 2": Case("batchnorm_leak", 80, {"batch": {"bn_group_size": 2}}, broken=no_shuffle),
    "no shuffle, groups of 4": Case("batchnorm_leak", 80, {"batch": {"bn_group_size": 4}}, broken=no_shuffle),
    "rate 3": Case("learning_rate_too_high", 60, {"optimizer": {"learning_rate": 3.0}, "schedule": {"warmup_steps": 0}}),
    "rate 0.5": Case("learning_rate_too_high", 60, {"optimizer": {"learning_rate": 0.5}, "schedule": {"warmup_steps": 0}}),
    "decay 0.5": Case("collapse", 240, {"optimizer": {"weight_decay": 0.5}}),
    "T = 5": Case("loss_at_chance", 200, {"contrast": {"temperature": 5.0}}),
    "rate 1e-6": Case("loss_at_chance", 200, {"optimizer": {"learning_rate": 1e-6}}),
    "K ten times the rows": Case("false_negatives", 60, {"contrast": {"queue_keys": 10 * FEW_ROWS}}, "few"),
    "queue full after the run": Case("queue_not_filled", 60, {"contrast": {"queue_keys": 7000}}, steps=100),
    "input throttled": Case("input_bound", 60, pace=0.6, steps=100),
    "5 % duplicates": Case("duplicates", 30, data="duplicates"),
}


def make_data(folder: Path) -> None:
    """The three data sets, as `folder`/NAME/train."""
    drawn_prototypes(folder / "plain", rows=ROWS, test_rows=100)
    drawn_prototypes(folder / "few", rows=FEW_ROWS, test_rows=100)
    shutil.copytree(folder / "plain", folder / "duplicates")
    for path in sorted((folder / "duplicates" / "train").glob("*.parquet")):
        table = pq.read_table(path)
        copied = table.num_rows // 20
        kept = table.slice(0, table.num_rows - copied)
        pq.write_table(pa.concat_tables([kept, table.slice(0, copied)]), path)


def carry(case: Case, folder: Path, until: int | None = None) -> tuple[list[dict[str, Any]], Plan]:
    """The records of the first `until` steps of the run, or of all, as metrics.jsonl would hold them, and its plan."""
    torch.set_num_threads(2)
    values = {section: dict(table) for section, table in VALUES.items()}
    values["schedule"]["steps"] = case.steps
    for section, table in case.changes.items():
        values[section] |= table
    recipe = Recipe.parse(values)
    manifest = build_manifest(str(folder / case.data / "train"), "image")
    plan, learner, ranks, entries = Plan(recipe, manifest.rows), Learner.new(recipe), Ranks(), []
    source, meter = Source(manifest, recipe, plan), Meter(plan, ranks, 0)

    def record(entry, bad):
        entries.append({**entry, **meter.rates(entry["step"])[0]})

    def whereabouts(keys):
        return torch.from_numpy(rows_of_slots(keys.steps.numpy(), keys.position, plan, source.order))

    outputs = Outputs(record, lambda learner: None, None, rows_of_slots=whereabouts)
    rows = itertools.islice(meter.timed(paced(rows_without_ray(source), case.pace)), until or case.steps)
    with case.broken(), contextlib.suppress(NonFinite, StopIteration):
        train(learner, rows, plan, ranks, outputs)
    return entries, plan


def paced(batches: Iterator[Batch], seconds: float) -> Iterator[Batch]:
    """The same, made by a thread some steps ahead, each after so many seconds."""
    made: queue.Queue = queue.Queue(maxsize=8)

    def make():
        for batch in batches:
            time.sleep(seconds)
            made.put(batch)
        made.put(None)

    threading.Thread(target=make, daemon=True).start()
    while (batch := made.get()) is not None:
        yield batch


def rows_without_ray(source: Source) -> Iterator[Batch]:
    """The same tasks that Ray would carry, one after another in this process."""
    segments = Segments(source.plan, 1, 0, 0)
    for index in range(len(segments)):
        for columns in segment_steps(source, segments.groups, segments[index]):
            crops, positions, rows, content = (torch.from_numpy(columns[name]) for name in ("crops", "position", "row", "content"))
            yield Batch(segments[index].epoch, crops, positions, rows, content=content)


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        make_data(Path(place))
        for name in names or CASES:
            entries, plan = carry(CASES[name], Path(place))
            raised = ", ".join(f"{one.name} at step {one.step}" for one in judge(entries, plan))
            print(f"{name:26s} {raised or 'none'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
