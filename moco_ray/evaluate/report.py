"""The result of a training on labels as text, Markdown and JSON.

Responsible for the words. Not responsible for numbers (probe.py, sweep.py) nor for where they are written (probe_run.py).
"""

from dataclasses import dataclass
from typing import Any

NOTE = "the best epoch is chosen on the test set: the last one is the result"


@dataclass(frozen=True)
class Result:
    """What a protocol reached. `last` and `best` are Scores as dictionaries; shares, 0..1."""

    protocol: dict[str, Any]  # name, and all that was set
    last: dict[str, Any]
    last_epoch: int
    best: dict[str, Any]
    best_epoch: int
    history: list[dict[str, Any]]
    facts: dict[str, Any]  # JSON: backbone, sets, code and the like


def as_json(result: Result) -> dict[str, Any]:
    """For json.dumps. `markdown` is the table's line."""
    return {
        "protocol": result.protocol,
        **result.facts,
        "last": {"epoch": result.last_epoch, **result.last},
        "best": {"epoch": result.best_epoch, "note": NOTE, **result.best},
        "history": result.history,
        "markdown": as_markdown(result).splitlines()[-1],
    }


def as_text(result: Result) -> str:
    """For a terminal; no line break at the end."""
    lines = [f"{result.protocol['name']}  epoch   top-1   top-5"]
    indent = " " * len(result.protocol["name"])
    for name, epoch, scores in (("last", result.last_epoch, result.last), ("best", result.best_epoch, result.best)):
        lines.append(f"{name.ljust(len(indent))}  {epoch:5d}  {per_cent(scores['top1']):>6}  {per_cent(scores['top5']):>6}")
    return "\n".join([*lines, f"({about(result)}; {NOTE})"])


def as_markdown(result: Result) -> str:
    """A table of one line, for a README. Accuracies in per cent; no line break at the end."""
    backbone, sets = result.facts["backbone"], result.facts["sets"]
    cells = {
        "protocol": result.protocol["name"],
        "backbone": f"{backbone['name']}{step_of(backbone)}",
        "labels": f"{result.protocol['label_percent']} %",
        "epochs": str(result.last_epoch),
        "top-1": per_cent(result.last["top1"]),
        "top-5": per_cent(result.last["top5"]),
        "best epoch": f"{per_cent(result.best['top1'])} ({result.best_epoch})",
        "recipe": result.protocol["recipe_fingerprint"],
        "checkpoint": hash_of(backbone)[:12],
        "training set": sets["training"]["fingerprint"],
        "test set": sets["test"]["fingerprint"],
    }
    rows = (list(cells), ["---"] * len(cells), list(cells.values()))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def about(result: Result) -> str:
    """One line: what was judged, on what."""
    facts = result.facts
    text = f"{facts['backbone']['name']}{step_of(facts['backbone'])}; {facts['labels_used']} of {facts['sets']['training']['rows']} training rows, "
    text += f"{facts['sets']['test']['rows']} test rows"
    if facts["test_rows_left_out"]:
        text += f", {facts['test_rows_left_out']} of which could not be read and are left out"
    if facts.get("training_rows_replaced"):
        text += f"; {facts['training_rows_replaced']} times an unreadable training row was replaced by another"
    return text


def step_of(backbone: dict[str, Any]) -> str:
    return f", step {backbone['step']}" if "step" in backbone else ""


def hash_of(backbone: dict[str, Any]) -> str:
    """SHA-256 of the checkpoint, or of the file that was read."""
    return str(backbone.get("sha256") or backbone.get("file_sha256") or "")


def per_cent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
