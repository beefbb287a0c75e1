"""Run folders made by hand: what a run writes, without running one.

Responsible for files that the commands which look at runs can read. Not responsible for checkpoints that training could go on from.
"""

import json
import math
from typing import Any

import torch

from moco_ray import attempts, checkpoint
from moco_ray.attempts import Attempt
from moco_ray.data import order
from moco_ray.data.storage import Store
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe
from tests import synthetic

BEGAN = 1_796_000_000.0  # seconds since 1970
ABOUT = {"recipe_fingerprint": "r", "data_fingerprint": "d", "order_version": order.VERSION}


def make_run(storage: Store, name: str, steps: int = 12, total: int = 20, rows: int = 300, **changes: dict[str, Any]) -> Store:
    """A run of `total` steps with one entry for each of the first `steps`. `changes` go into its recipe."""
    run = storage.below(name)
    recipe = synthetic.recipe(**changes, schedule={"steps": total})
    write_facts(run, recipe, rows)
    write_lines(run, "metrics.jsonl", [entry(step, recipe) for step in range(1, steps + 1)])
    return run


def write_facts(run: Store, recipe: Recipe, rows: int) -> None:
    run.write("recipe.toml", recipe.toml().encode())
    run.write("plan.json", json.dumps(Plan(recipe, rows).facts()).encode())
    versions = {"torch": "2.0", "ray": "2.60"}
    facts = {"started": "2026-12-01T00:00:00+00:00", "git_commit": "abc123", "git_dirty": False, "python": "3.11", "versions": versions, "data_fingerprint": "d"}
    run.write("run.json", json.dumps(facts).encode())


def write_lines(run: Store, name: str, entries: list[dict[str, Any]], torn: str = "") -> None:
    run.write(name, ("".join(json.dumps(entry) + "\n" for entry in entries) + torn).encode())


def entry(step: int, recipe: Recipe | None = None, **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl; the queue of 100 keys is full from step 4 on."""
    chance = math.log((recipe.contrast.queue_keys if recipe else 100) + 1)
    return {
        "step": step, "epoch": step / 9, "loss": chance - step / 10, "chance_loss": chance, "top1": step / 100, "top5": step / 50,
        "positive_similarity": 0.8, "negative_similarity": 0.0, "gradient_norm": 1.0, "learning_rate": 0.01,
        "queue_fill": min(1.0, 32 * step / 100), "images_per_second": 100.0 + step, "input_wait_share": 0.01, "bad_rows": 0,
        "peak_memory_bytes": 1000, "workers": 2, "attempt": 1, "wall_time": BEGAN + step, **values,
    }  # fmt: skip


def evaluation(step: int, share: float) -> dict[str, Any]:
    return {"step": step, "epoch": step / 9, "knn_top1": share, "knn_left_out": 0, "wall_time": BEGAN + step}


def event(kind: str, step: int, text: str = "", **facts: Any) -> dict[str, Any]:
    return {"wall_time": BEGAN + step, "kind": kind, "step": step, "text": text or kind, **facts}


def health(run: Store, step: int, *verdicts: dict[str, Any]) -> None:
    state = "ill" if verdicts else "healthy"
    run.write("health.json", json.dumps({"step": step, "state": state, "verdicts": verdicts}).encode())


def verdict(name: str = "stale_dictionary", step: int = 8) -> dict[str, Any]:
    return {"name": name, "step": step, "seen": "queue top-1 is 8.7 times fresh top-1", "means": "old keys are told by their age", "change": "raise contrast.key_momentum"}


def lease(run: Store, **facts: Any) -> None:
    """By default of a process on another machine, that holds the run."""
    held = {"holder": "process 7 on elsewhere", "boot": "other", "pid_namespace": "other", "pid": 7, "process_start": "1", "id": "x", "beat": 1, "released": False}
    run.write("lease.json", json.dumps(held | facts).ljust(1024).encode())


def checkpoints(run: Store, *steps: int, attempt: int = 1, size: int = 100) -> list[checkpoint.Saved]:
    """Whole ones, of one attempt that began at step 0 unless it is registered already."""
    if attempt not in attempts.numbers(run):
        attempts.register(run, Attempt(attempt, 0, 2))
    return [
        checkpoint.save(run, step, attempt, checkpoint.pack({"x": torch.full((size,), float(step))}, ABOUT), ABOUT, keep=99) for step in steps
    ]
