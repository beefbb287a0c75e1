"""The page of curves by which a run's health is judged: the dictionary, the features and the input, with marks where something happened.

Not responsible for the verdicts (verdicts.py) nor for how a panel is drawn (curves.py).
"""

import io
import textwrap
from typing import Any, NamedTuple

from moco_ray.errors import UserError
from moco_ray.evaluate.curves import DOTS_PER_INCH, Curve, Mark, Metric, Panel, draw_page

PAGE_INCHES = (16.5, 14.0)
FOOTER_LETTERS = 230  # in a line of the page's width
RAISED, RESTARTED = "#b3261e", "#6f6f6f"

PANELS = (
    Panel("Loss", (Metric("loss", "loss"), Metric("chance_loss", "chance, log(K+1)", True)), waits_for_queue=True),
    Panel(
        "Top-1: against the queue, and against this step's keys",
        (Metric("queue_top1", "queue"), Metric("fresh_top1", "this step's own (fresh)")),
        True,
        True,
    ),
    Panel(
        "Cosine similarity of a query",
        (
            Metric("positive_similarity", "to its key"),
            Metric("negative_similarity", "to the queue"),
            Metric("step_similarity", "to the step's other keys"),
        ),
        waits_for_queue=True,
    ),
    Panel(
        "Softmax mass on the negatives, by quarter of their age",
        (Metric("mass_newest", "newest"), Metric("mass_newer", "newer"), Metric("mass_older", "older"), Metric("mass_oldest", "oldest")),
        True,
        True,
    ),
    Panel("Drift of keys in the queue", (Metric("drift", "cosine with their re-encoding, as they leave"),)),
    Panel("From query encoder to key encoder", (Metric("parameter_distance", "|θq - θk| / |θq|"),)),
    Panel("Spread of this step's keys", (Metric("key_spread", "1: even, 0: collapsed"),)),
    Panel("Effective rank of this step's keys", (Metric("effective_rank", "dimensions in use"),)),
    Panel("kNN accuracy on labelled images", (Metric("knn_top1", "top-1"),), True),
    Panel("Gradient", (Metric("gradient_norm", "norm"),)),
    Panel("Throughput", (Metric("images_per_second", "images/s, all workers"),)),
    Panel("Waiting for input", (Metric("input_wait_share", "share of the time, mean of workers"),), True),
)
BEFORE = {"queue_top1": Metric("top1", "queue, mean of the steps since the last record")}  # of runs that recorded no such thing


class Happening(NamedTuple):
    """What the page marks: a verdict, or a restart if `name` is empty."""

    step: int
    name: str = ""
    text: str = ""  # for the page's foot


def draw_health(entries: list[dict[str, Any]], title: str, happened: list[Happening]) -> bytes:
    """The page as a PNG of 1980x1680 pixels. `entries` are those of a metrics.jsonl.

    What a run did not record, its panel says. Raises UserError if there is nothing to draw.
    """
    panels = tuple(_with_what_is_there(panel, entries) for panel in PANELS)
    curves = curves_of(entries, panels)
    if not curves:
        raise UserError("there is no metric to draw yet; wait until the run has logged a step")
    figure = draw_page(panels, curves, title, _footer(happened), _marks(happened), columns=3, inches=PAGE_INCHES)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    return content.getvalue()


def curves_of(entries: list[dict[str, Any]], panels: tuple[Panel, ...]) -> dict[str, Curve]:
    """The curves of the panels' metrics and of the queue's fill, by step; without what was never recorded."""
    curves = {}
    for name in [metric.name for panel in panels for metric in panel.metrics] + ["queue_fill"]:
        points = sorted((int(entry["step"]), float(entry[name])) for entry in entries if isinstance(entry.get(name), int | float))
        if points:
            curves[name] = Curve([step for step, _ in points], [value for _, value in points])
    return curves


def _with_what_is_there(panel: Panel, entries: list[dict[str, Any]]) -> Panel:
    metrics = tuple(
        BEFORE[metric.name] if metric.name in BEFORE and not any(metric.name in entry for entry in entries) else metric for metric in panel.metrics
    )
    return panel._replace(metrics=metrics)


def _marks(happened: list[Happening]) -> tuple[Mark, ...]:
    """One for each step: verdicts with their numbers at the page's foot, several at a step together."""
    numbers: dict[int, list[str]] = {}
    for number, one in enumerate((one for one in happened if one.name), start=1):
        numbers.setdefault(one.step, []).append(str(number))
    restarts = sorted({one.step for one in happened if not one.name})
    return (
        *(Mark(step, "", RESTARTED, ":") for step in restarts),
        *(Mark(step, ", ".join(texts), RAISED) for step, texts in sorted(numbers.items())),
    )


def _footer(happened: list[Happening]) -> str:
    verdicts = [f"{number}  {one.name}, step {one.step}: {one.text}" for number, one in enumerate((one for one in happened if one.name), start=1)]
    restarts = sum(not one.name for one in happened)
    notes = [*verdicts, f"Dotted: {restarts} restarts." if restarts else "", "The number beside a name is its last value."]
    return "\n".join(line for note in notes if note for line in textwrap.wrap(note, FOOTER_LETTERS))
