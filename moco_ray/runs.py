"""`moco-ray runs`: the runs of a storage, one line each.

Responsible for finding them and for the list. Not responsible for what a run's files mean (record.py), for comparing two
(compare.py) nor for removing anything (tidy.py).
"""

import math
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from moco_ray.data.storage import Entry, Store
from moco_ray.errors import UserError
from moco_ray.lease import BEAT_SECONDS, sign_of_life
from moco_ray.record import Record
from moco_ray.run_folder import FACTS, RunFolder
from moco_ray.standing import Standing
from moco_ray.words import age, size

READING_THREADS = 16
LISTINGS = 3  # on a disk a listing fails if what it is about to look at has just been pruned
WATCH_SECONDS = 2.4 * BEAT_SECONDS  # in which a run that is carried somewhere changes its lease twice
LAST_RECORDS = 50  # that are kept of each run, beside its evaluations
NONE = "-"


class Listed(NamedTuple):
    """One run. None where nothing was recorded, and for all but the name and state of a run that cannot be read."""

    name: str
    state: str  # as in record.State, or "unreadable"
    why: str = ""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    chance_loss: float | None = None
    knn_last: float | None = None  # shares, 0..1
    knn_best: float | None = None
    health: str = ""  # "filling", "healthy", "ill"; "" of a run without
    verdicts: tuple[str, ...] = ()  # names
    started: str = ""
    written_at: float | None = None  # seconds since 1970
    bytes: int = 0
    safe_step: int | None = None  # of the newest checkpoint: what a failure goes back to


def list_runs(storage: str) -> list[Listed]:
    """The runs of a storage by name. Waits WATCH_SECONDS where a lease tells nothing by itself: held, and by another machine.

    A run that cannot be read is listed as that, with the reason. Raises UserError for a storage without runs.
    """
    store = Store.at(storage)
    entries, closed = all_entries(store)
    names = sorted(name for name, slash, rest in (entry.name.partition("/") for entry in entries) if rest == FACTS)
    if not names and not closed:
        raise UserError(_nothing(storage, store, entries))
    sizes = {name: sum(entry.bytes for entry in entries if entry.name.startswith(f"{name}/")) for name in names}
    with ThreadPoolExecutor(READING_THREADS) as threads:
        read = dict(zip(names, threads.map(lambda name: _read(store.below(name)), names), strict=True))
        silent = watched([record for record in read.values() if isinstance(record, Record)])
        listed = list(threads.map(lambda name: _listed(name, read[name], silent, sizes[name]), names))
    return sorted([*listed, *(Listed(name, "unreadable", why) for name, why in closed.items())])


def all_entries(store: Store) -> tuple[list[Entry], dict[str, str]]:
    """Everything below, also while runs there write and prune; and on a disk why a folder cannot be listed, another user's perhaps. Raises UserError."""
    if not store.is_local or not Path(store.uri).is_dir():
        return store.list(), {}
    entries, closed = [], {}
    for child in sorted(Path(store.uri).iterdir()):
        if not child.is_dir():
            entries.append(Entry(child.name, child.lstat().st_size, 0))
            continue
        try:
            entries += [entry._replace(name=f"{child.name}/{entry.name}") for entry in _settled(store.below(child.name))]
        except UserError as error:
            closed[child.name] = str(error)
    return entries, closed


def _settled(store: Store) -> list[Entry]:
    for attempt in range(LISTINGS):
        try:
            return store.list()
        except UserError:
            if attempt == LISTINGS - 1:
                raise
    raise AssertionError("the last listing returns or raises")


def run_in(storage: str, name: str) -> RunFolder:
    """A run of a storage by its name. Raises UserError, with the names that there are, if there is none."""
    store = Store.at(storage)
    if name and "/" not in name and store.below(name).size(FACTS) is not None:
        return RunFolder(store.below(name))
    names = sorted(entry.name.partition("/")[0] for entry in all_entries(store)[0] if entry.name.partition("/")[2] == FACTS)
    there = f"there are {', '.join(names[:8])}{' ..' if len(names) > 8 else ''}" if names else "there is none"
    raise UserError(f"{store.place('')} has no run {name!r}; {there}")


def watched(records: Iterable[Record], seconds: float = WATCH_SECONDS) -> dict[str, float | None]:
    """URI of a run -> for how long its lease was watched without a change; None if it changed, or tells by itself."""
    open_ = {record.folder.place: record for record in records if record.sign and record.sign.alive is None and not record.sign.released}
    began = time.monotonic()
    found: dict[str, float | None] = dict.fromkeys(open_, 0.0)
    while open_ and (passed := time.monotonic() - began) < seconds:
        time.sleep(min(1.0, seconds - passed))
        for place, record in list(open_.items()):
            sign = sign_of_life(record.folder.store)
            found[place] = time.monotonic() - began
            if sign is None or sign.released or sign.content != record.sign.content:
                record.sign, found[place] = sign, None
                del open_[place]
    return found


def as_table(runs: list[Listed], now: float) -> str:
    """The list for a person; `now` in seconds since 1970."""
    rows = [("run", "state", "step", "safe at", "loss", "kNN last", "best", "last line", "size", "health")]
    rows += [
        (
            run.name,
            run.state,
            NONE if run.step is None else f"{run.step}/{run.total_steps}",
            NONE if run.safe_step in (None, run.step) else str(run.safe_step),
            NONE if run.loss is None else f"{run.loss:.3f}",
            _share(run.knn_last),
            _share(run.knn_best),
            NONE if run.written_at is None else age(now - run.written_at),
            size(run.bytes),
            ", ".join(name.replace("_", " ") for name in run.verdicts) or run.health or NONE,
        )
        for run in runs
    ]
    notes = [f"{run.name}: {run.state}: {run.why}" for run in runs if run.why and run.state != "running"]
    return "\n".join([*columns(rows, "<<>>>>>>><"), *([""] if notes else []), *notes])


def as_json(runs: list[Listed]) -> list[dict[str, Any]]:
    """The list for a program; numbers that are not finite are null."""
    return [{key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in run._asdict().items()} for run in runs]


def columns(rows: list[tuple[str, ...]], sides: str, gap: str = "  ") -> list[str]:
    """Rows of texts as lines, each column as wide as its widest; `sides` has < or > for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip() for row in rows]


def _share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def _read(store: Store) -> Record | UserError:
    try:
        record = Record(RunFolder(store)).refreshed(end=True)
    except UserError as error:
        return error
    entries = record.metrics.entries
    entries[:-LAST_RECORDS] = [entry for entry in entries[:-LAST_RECORDS] if "knn_top1" in entry]  # of hundreds of long runs the memory would not hold the rest
    return record


def _listed(name: str, record: Record | UserError, silent: dict[str, float | None], count: int) -> Listed:
    if isinstance(record, UserError):
        return Listed(name, "unreadable", str(record), bytes=count)
    try:
        state, total, facts = record.state(silent.get(record.folder.place)), record.derived["total_steps"], record.facts
        best = Standing.read(record.folder.store).best
    except UserError as error:
        return Listed(name, "unreadable", str(error), bytes=count)
    last = record.training[-1] if record.training else {}
    knn = [entry["knn_top1"] for entry in record.evaluations]
    return Listed(
        name,
        state.word,
        state.why,
        record.step,
        total,
        last.get("loss"),
        last.get("chance_loss"),
        knn[-1] if knn else None,
        max([*knn, *([best.knn_top1] if best else [])], default=None),
        record.health.get("state", ""),
        tuple(one["name"] for one in record.health.get("verdicts", [])),
        str(facts.get("started", "")),
        None if math.isnan(record.written_at) else record.written_at,
        count,
        record.safe_step,
    )


def _nothing(storage: str, store: Store, entries: list[Entry]) -> str:
    if any(entry.name == FACTS for entry in entries):
        return f"{storage} is a run itself; give the folder that it lies in, or `moco-ray watch {storage}`"
    if not entries:
        return f"there is nothing at {store.place('')}; give the --storage of `moco-ray pretrain`"
    return f"no run lies in {store.place('')} (no folder there has a {FACTS}); give the --storage of `moco-ray pretrain`"
