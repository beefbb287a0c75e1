"""A run as a person carries it on a cluster, watched from outside; and the same run that nothing ever happens to.

Responsible for starting commands, waiting for what they write, and the comparison. Not responsible for clusters (clusters.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moco_ray import checkpoint
from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.data.segment import Segments, Source, segment_steps
from moco_ray.data.storage import Store
from moco_ray.data.stream import _batch
from moco_ray.data.survey import build_manifest
from moco_ray.learner import Learner
from moco_ray.monitor import read_metrics
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.train import train
from tests.clusters import wait_until
from tests.synthetic import Log, copy_state

TOLERANCE = 1e-8  # float64: another number of workers adds up in another order, and nothing else
RECIPE = """
[encoder]
backbone = "resnet10"
stem = "small_stride2"
feature_dim = 16
precision = "float64"
[contrast]
queue_keys = 100
key_momentum = 0.99
[batch]
global_batch_size = 16
bn_group_size = 4
[optimizer]
learning_rate = 0.01
[schedule]
steps = {steps}
[augment]
image_pixels = 24
blur_probability = 0.0
[run]
log_every_steps = 1
checkpoint_every_steps = {every}
memory_format = "contiguous"
hang_timeout_seconds = 8.0
"""
ROWS = 200  # 12 steps an epoch, 8 rows left out


class Carried:
    """One run: its folder, its data, and the commands that carry it."""

    def __init__(self, folder: Path, environment: dict[str, str], steps: int, every: int, storage: str = "runs"):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run = folder, folder / "runs" / "tiny"
        self.environment, self._storage, self._logs = environment, storage, 0
        self.steps = steps
        if not (folder / "drawn").exists():
            drawn_prototypes(folder / "drawn", rows=ROWS, test_rows=20)
        (folder / "tiny.toml").write_text(RECIPE.format(steps=steps, every=every))

    def command(self, workers: str, data: str = "drawn/train") -> list[str]:
        words = ["pretrain", "tiny.toml", "--workers", workers, "--data", data, "--storage", self._storage]
        return [sys.executable, "-m", "moco_ray", *words]

    def start(self, workers: str, data: str = "drawn/train", run: Callable = subprocess.Popen) -> subprocess.Popen:
        """`moco-ray pretrain`: the first time it begins the run, then it goes on with it. Its words go to a file."""
        self._logs += 1
        self.log = self.folder / f"log{self._logs}"
        with self.log.open("w") as file:
            self.process = run(
                self.command(workers, data),
                env={**os.environ, **self.environment},
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return self.process

    @property
    def words(self) -> str:
        return self.log.read_text()

    def metrics(self) -> list[dict[str, Any]]:
        return [entry for entry in read_metrics(self.run / "metrics.jsonl") if "loss" in entry]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_metrics(self.run / "events.jsonl") if event["kind"] == kind]

    def wait_for_step(self, step: int, seconds: float = 150) -> None:
        self.wait(lambda: (self.metrics() or [{"step": 0}])[-1]["step"] >= step, seconds, f"step {step}")

    def wait_for(self, kind: str, count: int = 1, seconds: float = 150) -> dict[str, Any]:
        """The `count`-th event of a kind."""
        self.wait(lambda: len(self.events(kind)) >= count, seconds, f"{count} x {kind}")
        return self.events(kind)[count - 1]

    def wait(self, happened: Callable[[], bool], seconds: float, what: str) -> None:
        def happened_or_ended() -> bool:
            return happened() or self.process.poll() is not None

        try:
            wait_until(happened_or_ended, seconds, what)
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.words}") from error
        assert happened(), f"the command ended with {self.process.poll()} before {what}:\n{self.words}"

    def finish(self, seconds: float = 480) -> None:
        code = self.process.wait(timeout=seconds)
        assert code == 0, f"it ended with {code}:\n{self.words}"

    def newest(self) -> checkpoint.Saved | None:
        return checkpoint.newest(Store(str(self.run)))

    def attempts(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.run / "attempts").glob("*.json"))]

    def next_step_seconds(self, since: float, after_attempt: int) -> float:
        """From a moment (UNIX time) to the first step that a later attempt completed."""
        times = [e["wall_time"] for e in self.metrics() if e["attempt"] > after_attempt and e["wall_time"] > since]
        return times[0] - since

    def refuse_other_than_undisturbed(self) -> None:
        """See that every step is there once, and that losses and the last state equal those of a run without failures."""
        found = self.metrics()
        assert [entry["step"] for entry in found] == list(range(1, self.steps + 1))
        log = undisturbed(self.folder / "drawn" / "train", Recipe.read(self.folder / "tiny.toml"))
        worst = max(abs(a["loss"] - b) for a, b in zip(found, log.losses(), strict=True))
        assert worst < TOLERANCE, f"losses differ by up to {worst}"
        state, _ = checkpoint.load(Store(str(self.run)), self.newest())
        furthest = difference(state, log.states[self.steps])
        assert furthest < TOLERANCE, f"the last checkpoint differs by up to {furthest}"


def undisturbed(data: Path, recipe: Recipe) -> Log:
    """One worker that nothing ever happens to, in this process: the loop over the same images, without Ray."""
    manifest = build_manifest(str(data), recipe.data.image_column)
    plan = Plan(recipe, manifest.rows)
    segments = Segments(plan, 1, 0, 0)
    source, seen = Source(manifest, recipe, plan), {}

    def batches():
        step = 0
        for number in range(len(segments)):
            for columns in segment_steps(source, segments.groups, segments[number]):
                batch = _batch(columns, segments, step)
                for row in batch.rows.tolist():
                    assert seen.setdefault((batch.epoch, row), step) == step, "a row came twice in an epoch"
                step += 1
                yield batch

    log, learner = Log(), Learner.new(recipe)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(learner, batches(), plan, Ranks(), log.outputs())
    finally:
        torch.set_num_threads(threads)
    log.states[plan.total_steps] = copy_state(learner.state_dict())
    return log


def difference(one: Any, other: Any) -> float:
    """The largest difference between two states; infinite if they are not built alike."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.shape == other.shape
        return float((one.double() - other.double()).abs().max()) if same and one.numel() else 0.0 if same else float("inf")
    if isinstance(one, dict):
        if not isinstance(other, dict) or one.keys() != other.keys():
            return float("inf")
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list | tuple):
        return max((difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return 0.0 if one == other or isinstance(one, float) and abs(one - other) < 1e-12 else float("inf")
