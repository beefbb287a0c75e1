"""One page of a run's curves, drawn from its metrics.jsonl.

Responsible for reading that file, for the PNG, and for the parts that another page of curves is made of (health_page.py).
Not responsible for what is measured (see monitor.py).
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from moco_ray.errors import UserError

PAGE_INCHES = (11.0, 12.5)
DOTS_PER_INCH = 120
COLOURS = ("#1f5fa8", "#d1662a", "#3d8a53", "#8a5a9e")
QUIET, SHADE = "#777777", "#f3dfa6"
SHOW_POINTS = 30  # a curve of fewer points shows each of them


class Metric(NamedTuple):
    """A name in the file, and how the page calls it."""

    name: str
    label: str
    dashed: bool = False  # a line to compare with


class Panel(NamedTuple):
    """One set of axes."""

    title: str
    metrics: tuple[Metric, ...]
    share: bool = False  # values are shares, 0..1, shown in per cent from 0
    waits_for_queue: bool = False  # means nothing while the queue holds random vectors


class Page(NamedTuple):
    """What is around and across the panels."""

    title: str
    footer: str = "The number beside a name is its last value."
    columns: int = 2
    inches: tuple[float, float] = PAGE_INCHES  # width, height
    marks: tuple["Mark", ...] = ()
    filling: str = "queue filling: loss and accuracy mean nothing yet"  # over a shaded panel; "" where the footer says so


class Curve(NamedTuple):
    """The points of one metric."""

    steps: list[int]
    values: list[float]


class Mark(NamedTuple):
    """Something that happened at a step: a line across every panel, with a short text at its upper end."""

    step: int
    text: str  # "" for a line alone
    colour: str
    style: str = "-"  # of the line


PANELS = (
    Panel("Loss", (Metric("loss", "loss"), Metric("chance_loss", "chance, log(K+1)", True)), waits_for_queue=True),
    Panel("(K+1)-way choice", (Metric("top1", "top-1"), Metric("top5", "top-5")), True, True),
    Panel(
        "Cosine similarity of a query",
        (Metric("positive_similarity", "to its own key"), Metric("negative_similarity", "to the queue, mean")),
    ),
    Panel("kNN accuracy on labelled images", (Metric("knn_top1", "top-1"),), True),
    Panel("Learning rate", (Metric("learning_rate", "learning rate"),)),
    Panel("Queue fill", (Metric("queue_fill", "keys from this run"),), True),
    Panel("Throughput", (Metric("images_per_second", "images/s, all workers"),)),
    Panel("Waiting for input", (Metric("input_wait_share", "share of the time, mean of workers"),), True),
)


def draw_curves(metrics_path: Path, png_path: Path, title: str) -> list[str]:
    """Draw every known metric of `metrics_path` on one page, and return the names of those drawn.

    The file has one JSON object a line with "step" (completed steps) and any of the metrics of PANELS;
    where it has none of a panel's, the panel says so. A last line that was cut off is left out, for the run
    may be writing it. `png_path` (1320x1500 pixels) is replaced once the page is whole. Raises UserError if
    the file is missing, without metrics, or not of this kind.
    """
    curves = _read(Path(metrics_path))
    figure = draw_page(PANELS, curves, Page(title))
    part = Path(png_path).with_suffix(".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(part, format="png", dpi=DOTS_PER_INCH)
    part.replace(png_path)
    return [metric.name for panel in PANELS for metric in panel.metrics if metric.name in curves]


def draw_page(panels: tuple[Panel, ...], curves: dict[str, Curve], page: Page) -> Figure:
    """The panels row by row; the caller saves them. `curves` are not empty.

    The stretch in which the queue was filling is shaded where a panel means nothing meanwhile.
    """
    figure = Figure(figsize=page.inches, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)
    figure.suptitle(page.title, fontsize=14, fontweight="bold")
    figure.supxlabel(page.footer, fontsize=8.5, color=QUIET, **({"x": 0.01, "ha": "left"} if "\n" in page.footer else {}))
    columns = page.columns
    axes = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False)
    last_step = max(curve.steps[-1] for curve in curves.values())
    filled_at = _filled_at(curves)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_xlim(0, 1.02 * last_step or 1)
        if _draw_panel(axis, panel, curves, filled_at if panel.waits_for_queue else 0, page.filling):
            _draw_marks(axis, page.marks)
    return figure


def _read(path: Path) -> dict[str, Curve]:
    """Metric name -> its curve, in the order of the steps. Raises UserError."""
    if not path.is_file():
        raise UserError(f"no metrics at {path}; give the metrics.jsonl of a run that has logged a step")
    lines = path.read_text(encoding="utf-8").splitlines()
    known = {metric.name for panel in PANELS for metric in panel.metrics}
    curves: dict[str, Curve] = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            step = int(entry["step"])
            points = {name: float(entry[name]) for name in known & entry.keys()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):
                break
            raise UserError(f"line {number} of {path} is no JSON object with a step and numbers ({error})") from error
        for name, value in points.items():
            curve = curves.setdefault(name, Curve([], []))
            curve.steps.append(step)
            curve.values.append(value)
    if not curves:
        raise UserError(f"{path} holds no metrics yet; wait until the run has logged a step")
    return curves


def _filled_at(curves: dict[str, Curve]) -> int:
    """The first logged step at which the queue held real keys only; the last one if it never did; 0 if unknown."""
    fill = curves.get("queue_fill")
    if fill is None or fill.values[0] >= 1.0:
        return 0
    return next((step for step, value in zip(*fill, strict=True) if value >= 1.0), fill.steps[-1])


def _draw_panel(axis: Axes, panel: Panel, curves: dict[str, Curve], filled_at: int, filling: str) -> bool:
    """Whether there was anything to draw."""
    axis.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", pad=22)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9, color=QUIET)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set_xlabel("completed steps", fontsize=9, color=QUIET)
    drawn = [metric for metric in panel.metrics if metric.name in curves]
    if not drawn:
        axis.text(0.5, 0.5, "not recorded in this run", transform=axis.transAxes, ha="center", color=QUIET)
        axis.set_yticks([])
        return False
    if filled_at:
        _mark_filling(axis, filled_at, filling)
    for metric, colour in zip(drawn, COLOURS, strict=False):
        _draw_curve(axis, metric, curves[metric.name], colour, panel.share)
    if panel.share:
        axis.set_ylim(0, 1.05 * max([0.01, *(v for m in drawn for v in curves[m.name].values if math.isfinite(v))]))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.grid(color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    legend = axis.legend(  # above the axes: in them it might hide a curve
        loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=8.5, frameon=False,
        borderaxespad=0.3, borderpad=0, handlelength=1.5, columnspacing=1.5,
    )  # fmt: skip
    legend.set_in_layout(False)  # the layout would make the axes narrow for it
    return True


def _draw_marks(axis: Axes, marks: tuple[Mark, ...]) -> None:
    for mark in marks:
        axis.axvline(mark.step, color=mark.colour, linestyle=mark.style, linewidth=1.0, zorder=1.5)
        if mark.text:
            axis.annotate(
                mark.text, xy=(mark.step, 1), xycoords=("data", "axes fraction"), xytext=(0, -1), textcoords="offset points",
                ha="center", va="top", fontsize=7.5, color="white", fontweight="bold", annotation_clip=True,
                bbox={"facecolor": mark.colour, "edgecolor": "none", "pad": 1.8},
            ).set_in_layout(False)  # fmt: skip


def _mark_filling(axis: Axes, filled_at: int, words: str) -> None:
    """Shade the steps before the queue is full, and say in the title's row, in the same colour, what that means."""
    axis.axvspan(0, filled_at, color=SHADE, linewidth=0)
    if not words:
        return
    axis.annotate(
        words,
        xy=(1, 1), xycoords="axes fraction", xytext=(0, 24), textcoords="offset points",
        ha="right", va="bottom", fontsize=8, bbox={"facecolor": SHADE, "edgecolor": "none", "pad": 2.5},
    ).set_in_layout(False)  # fmt: skip


def _draw_curve(axis: Axes, metric: Metric, curve: Curve, colour: str, share: bool) -> None:
    last = f"{100 * curve.values[-1]:.1f} %" if share else f"{curve.values[-1]:.4g}"
    axis.plot(
        curve.steps,
        curve.values,
        color=QUIET if metric.dashed else colour,
        linestyle="--" if metric.dashed else "-",
        linewidth=1.4,
        marker="o" if len(curve.steps) < SHOW_POINTS else "",
        markersize=4,
        label=f"{metric.label}: {last}",
    )
