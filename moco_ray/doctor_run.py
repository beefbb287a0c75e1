"""`moco-ray doctor RUN`: what is to be said of a run's health, as text and as one page of curves, while it runs or afterwards.

Responsible for the report and for health.png in the run folder. Not responsible for the verdicts themselves (verdicts.py), for
the picture (health_page.py), nor for what is checked before a run (the doctor of a recipe).
"""

import json
import math
import statistics
import textwrap
import time
from collections import Counter
from typing import Any, NamedTuple

from moco_ray.errors import UserError
from moco_ray.evaluate.health_page import Happening, draw_health
from moco_ray.record import Record
from moco_ray.runs import watched
from moco_ray.verdicts import judge
from moco_ray.words import duration, plural, say

PAGE = "health.png"
WIDTH = 110
MATTERED = {  # kinds of events that a report tells, and how they are counted: one, several
    "continuing": ("restart", "restarts"),
    "worker_lost": ("loss of workers", "losses of workers"),
    "node_lost": ("lost node", "lost nodes"),
    "silent": ("silence of a worker", "silences of workers"),
    "slow": ("slow worker", "slow workers"),
    "not_saved": ("checkpoint that could not be saved", "checkpoints that could not be saved"),
    "save_skipped": ("checkpoint left out", "checkpoints left out"),
    "skipped_checkpoint": ("checkpoint that could not be loaded", "checkpoints that could not be loaded"),
    "not_evaluated": ("evaluation that failed", "evaluations that failed"),
}
EVENTS_SHOWN = 12


class Raised(NamedTuple):
    """A verdict of this run, by this release or by the driver that carried it."""

    name: str
    step: int
    seen: str
    means: str
    change: str

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")


def report(place: str, as_json: bool) -> int:
    """Print the report of a run and write its page. 0: nothing was raised, 1: something was.

    Raises UserError if there is no such run, or nothing to judge yet.
    """
    record = Record.of(place)
    if not record.training:
        unreadable = f" that can be read ({plural(record.metrics.unreadable, 'line')} cannot)" if record.metrics.unreadable else ""
        raise UserError(f"{record.folder.place} has logged no step yet{unreadable}; ask again when it has, or see its events: `moco-ray watch {place}`")
    facts = examine(record)
    facts["picture"], facts["picture_error"] = _draw(record, facts)
    say(json.dumps(_finite(facts), indent=1) if as_json else as_text(facts))
    return 1 if facts["verdicts"] else 0


def examine(record: Record) -> dict[str, Any]:
    """What is to be said of a run, as plain values. Raises UserError if its files cannot be read."""
    plan, entries, events = record.plan, record.training, record.events.entries
    state = record.state(watched([record]).get(record.folder.place))
    knn = [{"step": entry["step"], "knn_top1": entry["knn_top1"]} for entry in record.evaluations]
    counters = next((event for event in reversed(events) if "restarts" in event), {})
    mattered = [event for event in events if event.get("kind") in MATTERED]
    recipe, last = plan.recipe, entries[-1]
    return {
        "run": record.folder.place,
        "name": record.name,
        "what": f"{recipe.encoder.backbone} on {plan.rows:,} images, batch {recipe.batch.global_batch_size} in {plan.groups} groups, K {recipe.contrast.queue_keys}, "
        f"m {recipe.contrast.key_momentum:g}, T {recipe.contrast.temperature:g}, seed {recipe.run.seed}",
        "recipe_fingerprint": record.derived.get("recipe_fingerprint", ""),
        "data_fingerprint": record.facts.get("data_fingerprint", ""),
        "git_commit": record.facts.get("git_commit", ""),
        "started": record.facts.get("started", ""),
        "state": state.word,
        "why": state.why,
        "step": record.step,
        "total_steps": plan.total_steps,
        "epoch": last.get("epoch"),
        "workers": last.get("workers"),
        "seconds": _seconds(record),
        "loss": last["loss"],
        "chance_loss": plan.chance_loss,
        "queue_fill": last.get("queue_fill"),
        "images_per_second": _median(entries, "images_per_second"),
        "input_wait_share": _median(entries, "input_wait_share"),
        "knn": knn,
        "knn_best": max(knn, key=lambda one: one["knn_top1"], default=None),
        "checkpoint_step": record.saved["step"] if record.saved else None,
        "restarts": counters.get("restarts", 0),
        "steps_recomputed": counters.get("steps_recomputed", 0),
        "seconds_lost": counters.get("seconds_lost", 0.0),
        "bad_rows": _bad_rows(entries, plan.steps_per_epoch),
        "events": [{key: event.get(key) for key in ("wall_time", "kind", "step", "text")} for event in mattered],
        "verdicts": [one._asdict() for one in raised(record)],
        "unreadable_lines": record.metrics.unreadable + record.events.unreadable,
    }


def raised(record: Record) -> list[Raised]:
    """By step: what the record shows, and what the driver raised on grounds that the record does not hold."""
    found = [Raised(one.name, one.step, one.seen, one.means, one.change) for one in judge(record.metrics.entries, record.plan)]
    names = {one.name for one in found}
    told = [one for one in record.health.get("verdicts", []) if one["name"] not in names]
    found += [Raised(one["name"], int(one.get("step", 0)), *(str(one.get(key, "")) for key in ("seen", "means", "change"))) for one in told]
    return sorted(found, key=lambda one: one.step)


def as_text(facts: dict[str, Any]) -> str:
    """The report for a person."""
    lines = [facts["name"]]
    for name, text in _table(facts):
        lines += textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14)
    lines += ["", *_verdicts(facts), "", *_events(facts), ""]
    lines.append(f"curves: {facts['picture']}" if facts["picture"] else f"no picture: {facts['picture_error']}")
    return "\n".join(lines)


def _table(facts: dict[str, Any]) -> list[tuple[str, str]]:
    knn, best, chance = facts["knn"], facts["knn_best"], facts["chance_loss"]
    fill = facts["queue_fill"]
    table = [
        ("what", facts["what"]),
        ("state", f"{facts['state']}{': ' + facts['why'] if facts['why'] else ''}"),
        ("how far", f"step {facts['step']} of {facts['total_steps']}, epoch {facts['epoch'] or 0:.2f}, {duration(facts['seconds'])} since its first start"),
        ("speed", _speed(facts)),
        ("loss", f"{facts['loss']:.3f} (chance {chance:.3f})" + (f"; the queue is {fill:.0%} full" if fill is not None and fill < 1 else "")),
        ("kNN", f"best {best['knn_top1']:.1%} at step {best['step']}, last {knn[-1]['knn_top1']:.1%} at step {knn[-1]['step']}" if best else "never evaluated"),
        ("safe", f"step {facts['checkpoint_step']}" if facts["checkpoint_step"] is not None else "no checkpoint was told of"),
    ]
    if facts["bad_rows"]:
        table.append(("bad images", f"{facts['bad_rows']}, listed in quarantine.jsonl"))
    if facts["unreadable_lines"]:
        table.append(("left out", f"{plural(facts['unreadable_lines'], 'line')} of the record that cannot be read"))
    return table


def _speed(facts: dict[str, Any]) -> str:
    rate, waits = facts["images_per_second"], facts["input_wait_share"]
    if rate is None:
        return "not recorded"
    workers = f" by {plural(facts['workers'], 'worker')}" if facts["workers"] else ""
    return f"{rate:.0f} images/s{workers}" + (f", {waits:.0%} of the time waiting for images" if waits is not None else "") + " (medians)"


def _verdicts(facts: dict[str, Any]) -> list[str]:
    if not facts["verdicts"]:
        return ["Nothing was raised."]
    lines = [f"Raised: {plural(len(facts['verdicts']), 'verdict')}"]
    for one in facts["verdicts"]:
        lines.append(f"  {one['name'].replace('_', ' ')}, at step {one['step']}")
        for key in ("seen", "means", "change"):
            lines += textwrap.wrap(one[key], WIDTH, initial_indent=f"    {key:<8}", subsequent_indent=" " * 12)
    return lines


def _events(facts: dict[str, Any]) -> list[str]:
    counts = Counter(event["kind"] for event in facts["events"])
    if not counts:
        return ["Nothing happened to it: no restart, no lost node, no failed checkpoint."]
    said = [f"{counts[kind]} {one if counts[kind] == 1 else several}" for kind, (one, several) in MATTERED.items() if counts[kind]]
    again = f"; {plural(facts['steps_recomputed'], 'step')} computed again, {facts['seconds_lost']:.0f} s lost" if facts["restarts"] else ""
    lines = [f"Happened: {', '.join(said)}{again}"]
    shown = facts["events"][-EVENTS_SHOWN:]
    if len(shown) < len(facts["events"]):
        lines.append(f"  the last {len(shown)} of {len(facts['events'])}; all are in events.jsonl")
    for event in shown:
        when = time.strftime("%m-%d %H:%M", time.gmtime(event["wall_time"] or 0))
        lines += textwrap.wrap(f"{when}  step {event['step']}: {event['text']}", WIDTH, initial_indent="  ", subsequent_indent=" " * 15)
    return lines


def _draw(record: Record, facts: dict[str, Any]) -> tuple[str, str]:
    """Where the page lies, or why there is none: a report of a run that may only be read is worth something too."""
    happened = [Happening(one["step"], one["name"].replace("_", " "), one["seen"]) for one in facts["verdicts"]]
    happened += [Happening(event["step"]) for event in facts["events"] if event["kind"] == "continuing"]
    try:
        record.folder.store.write(PAGE, draw_health(record.metrics.entries, f"{facts['name']}: {facts['state']} at step {facts['step']}", happened))
    except UserError as error:
        return "", str(error)
    return record.folder.store.place(PAGE), ""


def _seconds(record: Record) -> float:
    times = [line["wall_time"] for lines in (record.metrics, record.events) for line in lines.entries if isinstance(line.get("wall_time"), int | float)]
    return max(times) - min(times) if times else math.nan


def _bad_rows(entries: list[dict[str, Any]], steps_per_epoch: int) -> int:
    """Over all epochs, of which each entry counts those so far."""
    counts: dict[int, int] = {}
    for entry in entries:
        epoch = (entry["step"] - 1) // steps_per_epoch
        counts[epoch] = max(counts.get(epoch, 0), entry.get("bad_rows", 0))
    return sum(counts.values())


def _median(entries: list[dict[str, Any]], name: str) -> float | None:
    values = [entry[name] for entry in entries if isinstance(entry.get(name), int | float)]
    return statistics.median(values) if values else None


def _finite(value: Any) -> Any:
    """The same without numbers that JSON does not have: null in their place."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
