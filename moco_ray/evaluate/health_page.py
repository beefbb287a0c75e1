"""The page of curves by which a run's health is judged: the dictionary, the features and the input, with marks where something happened.

Not responsible for the verdicts (verdicts.py) nor for how a panel is drawn (curves.py).
"""

import io
import math
import textwrap
from typing import Any, NamedTuple

from moco_ray.errors import UserError
from moco_ray.evaluate.curves import DOTS_PER_INCH, Curve, Mark, Metric, Page, Panel, draw_page

COLUMNS, PAGE_INCHES, ROW_INCHES = 3, 16.5, 3.3
LINE_INCHES = 0.16
FOOTER_LETTERS = 200  # in a line of the page's width
NEAR = 0.03  # of the steps: two numbers closer than that would hide each other
RAISED, RESTARTED = "#b3261e", "#6f6f6f"

PANELS = (
    Panel("Loss", (Metric("loss", "loss"), Metric("chance_loss", "chance, log(K+1)", True)), waits_for_queue=True),
    Panel(
        "Top-1 in the queue and among the step's keys",
        (Metric("queue_top1", "queue"), Metric("fresh_top1", "the step's (fresh)")),
        True,
        True,
    ),
    Panel(
        "Cosine of a query with",
        (
            Metric("positive_similarity", "its key"),
            Metric("negative_similarity", "queue"),
            Metric("step_similarity", "step's other keys"),
        ),
        waits_for_queue=True,
    ),
    Panel(
        "Softmax mass on the negatives by age",
        (Metric("mass_newest", "newest"), Metric("mass_newer", "newer"), Metric("mass_older", "older"), Metric("mass_oldest", "oldest")),
        True,
        True,
    ),
    Panel("Drift of the keys in the queue", (Metric("drift", "cosine with their re-encoding, as they leave"),)),
    Panel("From query encoder to key encoder", (Metric("parameter_distance", "|θq - θk| / |θq|"),)),
    Panel("Spread of the step's keys", (Metric("key_spread", "1: even, 0: collapsed"),)),
    Panel("Effective rank of the step's keys", (Metric("effective_rank", "dimensions in use"),)),
    Panel("kNN accuracy on labelled images", (Metric("knn_top1", "top-1"),), True),
    Panel("Gradient", (Metric("gradient_norm", "norm"),)),
    Panel("Throughput", (Metric("images_per_second", "images/s, all workers"),)),
    Panel("Waiting for input", (Metric("input_wait_share", "share of the time, mean of workers"),), True),
)
BEFORE = {"queue_top1": Metric("top1", "queue")}  # of runs that recorded no such thing


class Happening(NamedTuple):
    """What the page marks: a verdict, or a restart if `name` is empty."""

    step: int
    name: str = ""
    text: str = ""  # for the page's foot


def draw_health(entries: list[dict[str, Any]], title: str, happened: list[Happening]) -> bytes:
    """The page as a PNG, 1980 pixels wide. `entries` are those of a metrics.jsonl, in any order.

    What a run did not record has no panel, and is named at the page's foot. Raises UserError if there is nothing to draw.
    """
    panels = tuple(_with_what_is_there(panel, entries) for panel in PANELS)
    curves = curves_of(entries, panels)
    drawn = tuple(panel for panel in panels if any(metric.name in curves for metric in panel.metrics))
    if not drawn:
        raise UserError("there is no metric to draw yet; wait until the run has logged a step")
    filling = any(value < 1 for value in curves["queue_fill"].values) if "queue_fill" in curves else False
    footer = _footer(happened, [panel.title for panel in panels if panel not in drawn], filling)
    inches = (PAGE_INCHES, 1.2 + ROW_INCHES * math.ceil(len(drawn) / COLUMNS) + LINE_INCHES * footer.count("\n"))
    marks = _marks(happened, max(curve.steps[-1] for curve in curves.values()))
    figure = draw_page(drawn, curves, Page(title, footer, COLUMNS, inches, marks, filling=""))
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


def _marks(happened: list[Happening], last_step: int) -> tuple[Mark, ...]:
    """Lines at each step; verdicts bear their numbers at the page's foot, those that would hide each other in one place."""
    marks = [Mark(step, "", RESTARTED, ":") for step in sorted({one.step for one in happened if not one.name})]
    verdicts = [one.step for one in happened if one.name]
    place, together = 0, []
    for number, step in enumerate(verdicts, start=1):
        if together and step - place > NEAR * last_step:
            marks.append(Mark(place, ", ".join(together), RAISED))
            together = []
        place = place if together else step
        together.append(str(number))
        marks.append(Mark(step, "", RAISED))
    return (*marks, Mark(place, ", ".join(together), RAISED)) if together else tuple(marks)


def _footer(happened: list[Happening], missing: list[str], filling: bool) -> str:
    verdicts = [f"{number}  {one.name}, step {one.step}: {one.text}" for number, one in enumerate((one for one in happened if one.name), start=1)]
    restarts = sum(not one.name for one in happened)
    notes = [
        *verdicts,
        f"Dotted lines: {restarts} {'restart' if restarts == 1 else 'restarts'}." if restarts else "",
        f"Not recorded in this run: {'; '.join(title[0].lower() + title[1:] for title in missing)}." if missing else "",
        "Shaded: the queue was filling, and loss and accuracy meant nothing yet." if filling else "",
        "The number beside a name is its last value.",
    ]
    return "\n".join(line for note in notes if note for line in textwrap.wrap(note, FOOTER_LETTERS))
