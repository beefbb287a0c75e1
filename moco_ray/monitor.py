"""What a person watches: scalars to TensorBoard and metrics.jsonl, rates, waits, the quarantine list.

Not here: what is measured in a step (train.py) and the progress bar, which lives with the driver
(progress.py) and is fed by `tell`.
"""

import contextlib
import json
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from moco_ray.data.batch import BadRow, Batch
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks

GROUPS = {  # card group in TensorBoard of each scalar
    "loss": "learning/loss",
    "top1": "learning/contrast_top1",
    "top5": "learning/contrast_top5",
    "learning_rate": "learning/learning_rate",
    "gradient_norm": "learning/gradient_norm",
    "knn_top1": "evaluation/knn_top1_backbone_features",
    "knn_left_out": "evaluation/images_left_out",
    "queue_fill": "dictionary/queue_fill",
    "positive_similarity": "dictionary/positive_similarity",
    "negative_similarity": "dictionary/negative_similarity",
    "images_per_second": "input/images_per_second",
    "input_wait_share": "input/wait_share",
    "bad_rows": "input/bad_rows",
    "peak_memory_bytes": "system/peak_memory_bytes",
}
NOT_REPRODUCIBLE = ("images_per_second", "input_wait_share", "peak_memory_bytes", "wall_time")  # times and rates


class Monitor:
    """Writes what the loop records; rank 0 writes, all ranks call. `tell` gets every entry (the progress bar)."""

    def __init__(self, run: Path, plan: Plan, ranks: Ranks, start_step: int, tell: Callable[[dict], None]):
        self._run, self._plan, self._ranks, self._tell = run, plan, ranks, tell
        self._waited, self._paused = 0.0, 0.0
        self._last_time, self._last_step = time.perf_counter(), start_step
        self._writers: dict[str, SummaryWriter] = {}
        if ranks.is_first:
            for name in ("metrics.jsonl", "quarantine.jsonl"):
                _cut_after(run / name, start_step)
            purge = start_step + 1  # takes back the points that an interrupted attempt wrote past its checkpoint
            self._writers = {
                "run": SummaryWriter(str(run / "tensorboard"), purge_step=purge, flush_secs=20),
                # A second small run under the same tag, so that chance is a line beside the loss.
                "chance": SummaryWriter(str(run / "tensorboard" / "chance"), purge_step=purge, flush_secs=20),
            }
            if not start_step:
                self._writers["run"].add_text("recipe", f"```\n{plan.recipe.toml()}\n```", 0)

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the time spent waiting for them is counted."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited += time.perf_counter() - began
            yield batch

    @contextlib.contextmanager
    def paused(self):
        """Time in here (checkpoints, evaluation) is not counted into the training rate."""
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    def record(self, entry: dict[str, Any], bad: list[tuple[int, BadRow]]) -> None:
        """One set of scalars at entry["step"]; bad rows of all ranks go to quarantine.jsonl. Collective."""
        if "loss" in entry:
            entry = {**entry, **self._rates(entry["step"])}
        if not self._ranks.is_first:
            return
        if bad:
            with (self._run / "quarantine.jsonl").open("a") as file:
                file.writelines(json.dumps(self._quarantined(epoch, row)) + "\n" for epoch, row in bad)
        with (self._run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**entry, "wall_time": time.time()}) + "\n")
        for name, tag in GROUPS.items():
            if name in entry:
                self._writers["run"].add_scalar(tag, entry[name], entry["step"])
        if "loss" in entry:
            self._writers["chance"].add_scalar(GROUPS["loss"], entry["chance_loss"], entry["step"])
        self._tell(entry)

    def _quarantined(self, epoch: int, row: BadRow) -> dict[str, Any]:
        step = epoch * self._plan.steps_per_epoch + row.position // self._plan.recipe.batch.global_batch_size
        return {"step": step + 1, "epoch": epoch, **row._asdict()}

    def _rates(self, step: int) -> dict[str, float]:
        now = time.perf_counter()
        elapsed = now - self._last_time - self._paused
        steps = step - self._last_step
        waited = self._ranks.sum(torch.tensor([self._waited], dtype=torch.float64, device=self._ranks.device))
        self._waited, self._paused, self._last_time, self._last_step = 0.0, 0.0, now, step
        return {
            "images_per_second": steps * self._plan.recipe.batch.global_batch_size / elapsed,
            "input_wait_share": min(1.0, float(waited) / self._ranks.world / elapsed),  # mean over ranks
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # of rank 0
        }

    def flush(self) -> None:
        """Bring TensorBoard's files up to date, so that a checkpoint never runs ahead of its curves."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl file; a last line cut off by a crash is left out."""
    entries = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            entries.append(json.loads(line))
    return entries


def _cut_after(path: Path, step: int) -> None:
    """Take back the lines of steps after `step`, which an interrupted attempt wrote past its checkpoint."""
    if not path.exists():
        return
    kept = [json.dumps(entry) + "\n" for entry in read_metrics(path) if entry["step"] <= step]
    part = path.with_suffix(".part")
    part.write_text("".join(kept))
    os.replace(part, path)


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    if not math.isfinite(seconds):
        return "?"
    minutes, left = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
