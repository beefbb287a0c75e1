"""One picture of a run in letters: a table with sparklines, for a terminal of any width.

Responsible for what stands where. It reads and prints nothing: record.py reads, watch.py prints.
"""

import math
import textwrap
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from moco_ray.pace import seconds_left
from moco_ray.record import Record, State
from moco_ray.words import age, duration, plural

BLOCKS = "▁▂▃▄▅▆▇█"
LABEL, VALUE = 13, 24  # letters of a row before its sparkline
EVENTS_SHOWN = 5
PLAIN, STRONG, ALARM, FAINT = "", "1", "1;31", "2"  # as SGR numbers of a terminal


class Line(NamedTuple):
    """A line of the frame, and how it is written on a terminal."""

    text: str
    style: str = PLAIN


class Row(NamedTuple):
    """A metric: its last value in words, and a sparkline of it."""

    label: str
    metric: str
    words: Callable[[dict[str, Any]], str]  # of the last entry that has the metric


def _percent(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda entry: f"{entry[name]:.1%}"


def _fresh(entry: dict[str, Any]) -> str:
    """With what a stale dictionary shows in: how many times as often a query is told apart in the queue."""
    fresh, queue = entry["fresh_top1"], entry.get("queue_top1", math.nan)
    return f"{fresh:.1%}" + (f" (queue {queue / fresh:.1f} x)" if fresh > 0 else "")


ROWS = (
    Row("loss", "loss", lambda entry: f"{entry['loss']:.3f} (chance {entry.get('chance_loss', math.nan):.3f})"),
    Row("queue top-1", "queue_top1", _percent("queue_top1")),
    Row("fresh top-1", "fresh_top1", _fresh),
    Row("top-1", "top1", _percent("top1")),  # where the two are not recorded
    Row("positive", "positive_similarity", lambda entry: f"cosine {entry['positive_similarity']:.3f}"),
    Row("drift", "drift", lambda entry: f"cosine {entry['drift']:.3f}"),
    Row("key spread", "key_spread", lambda entry: f"{entry['key_spread']:.3f} (1 is even)"),
    Row("kNN", "knn_top1", _percent("knn_top1")),
    Row("queue fill", "queue_fill", lambda entry: f"{entry['queue_fill']:.0%}"),
    Row("images/s", "images_per_second", lambda entry: f"{entry['images_per_second']:.0f}"),
    Row("input wait", "input_wait_share", lambda entry: f"{entry['input_wait_share']:.1%}"),
)


def frame(record: Record, state: State, now: float, width: int) -> list[Line]:
    """What is to be seen of a run now (seconds since 1970), no line longer than `width` letters."""
    lines = [
        Line(f"{record.name} · {state.word}{_health(record)} · {time.strftime('%H:%M:%S', time.localtime(now))}", STRONG),
        *([Line(f"{state.why}", ALARM)] if state.word in ("failed", "silent") and state.why else []),
        Line(_progress(record, state, width)),
        Line(""),
        *_rows(record, width),
        Line(""),
        Line(_safe(record, state, now)),
        *_seats(record),
        *_verdicts(record, width),
        *_events(record),
    ]
    return [Line(line.text if len(line.text) <= width else line.text[: width - 1] + "…", line.style) for line in lines]


def sparkline(points: list[tuple[int, float]], width: int, first: int, last: int) -> str:
    """The values over the steps `first` to `last` as `width` blocks, means where several fall into one. `points` by step.

    Where none falls the one before stands; blank before the first, and where a value is not finite "!". From the lowest block to the highest, and one of
    middle height where all are equal.
    """
    if not points or width < 1:
        return ""
    bins: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        bins[min(width - 1, (step - first) * width // max(1, last - first + 1))].append(value)
    means = [sum(values) / len(values) if values else None for values in bins]
    finite = [mean for mean in means if mean is not None and math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    drawn, before = [], " "
    for mean in means:
        if mean is not None:
            scaled = (mean - low) / (high - low) if high > low and math.isfinite(mean) else 0.5
            before = BLOCKS[round(scaled * (len(BLOCKS) - 1))] if math.isfinite(mean) else "!"
        drawn.append(before)
    return "".join(drawn)


def _health(record: Record) -> str:
    state = record.health.get("state")
    return f" · {state}" if state else ""


def _progress(record: Record, state: State, width: int) -> str:
    step, plan = record.step, record.plan
    share = min(1.0, step / plan.total_steps)
    words = f"step {step}/{plan.total_steps}"
    rest = f"{share:.0%} · epoch {step / plan.steps_per_epoch:.2f}/{plan.epochs:.4g}"
    if state.word == "running" and (left := seconds_left(plan, record.training, step)) is not None:
        rest += f" · {duration(left)} left"
    room = min(40, width - len(words) - len(rest) - 2)
    if room < 5:
        return f"{words} {rest}"
    full = round(share * room)
    return f"{words} {'█' * full}{'░' * (room - full)} {rest}"


def _rows(record: Record, width: int) -> list[Line]:
    entries = sorted(record.metrics.entries, key=lambda entry: entry["step"])
    room, lines = max(0, width - LABEL - VALUE), []
    for row in ROWS:
        having = [entry for entry in entries if isinstance(entry.get(row.metric), int | float)]
        if not having or (row.metric == "top1" and any("queue_top1" in entry for entry in entries)):
            continue
        words = row.words(having[-1])
        if row.metric == "knn_top1":
            words += f" (best {max(entry['knn_top1'] for entry in having):.1%})"
        points = [(entry["step"], float(entry[row.metric])) for entry in having]
        lines.append(Line(f"{row.label:<{LABEL}}{words:<{VALUE}}{sparkline(points, room, entries[0]['step'], entries[-1]['step'])}".rstrip()))
    if not lines:
        return [Line("no step is logged yet", FAINT)]
    if record.metrics.cut:
        lines.append(Line(f"from step {entries[0]['step']} on: of a long record only the end is read", FAINT))
    return lines


def _safe(record: Record, state: State, now: float) -> str:
    saved = record.saved
    if saved is None:
        return "no checkpoint is safe yet"
    ago = f", {age(now - saved['wall_time'])} ago" if isinstance(saved.get("wall_time"), int | float) else ""
    cost = f"; a failure now costs {plural(max(0, record.step - saved['step']), 'step')}" if state.word == "running" else ""
    return f"safe at step {saved['step']}{ago}{cost}"


def _seats(record: Record) -> list[Line]:
    """Where the workers, the data tasks and the driver of the last start are, on a cluster of several nodes."""
    placed = [event for event in record.events.entries if event.get("kind") == "placed"]
    return [Line(str(placed[-1].get("text", "")))] if placed else []


def _verdicts(record: Record, width: int) -> list[Line]:
    lines = []
    for one in record.health.get("verdicts", []):
        text = f"{one['name'].replace('_', ' ')} (step {one.get('step', '?')}): {one.get('seen', '')}. {one.get('change', '')}".rstrip(". ")
        lines += [Line(part, ALARM) for part in textwrap.wrap(text, width, initial_indent="! ", subsequent_indent="  ")]
    return [Line(""), *lines] if lines else []


def _events(record: Record) -> list[Line]:
    shown = [event for event in record.events.entries if event.get("kind") not in ("verdict", "placed")][-EVENTS_SHOWN:]  # those stand above
    lines = [
        Line(f"{time.strftime('%H:%M', time.localtime(event.get('wall_time') or 0))}  {event.get('text', '')}", FAINT) for event in reversed(shown)
    ]
    return [Line(""), *lines] if lines else []
