"""What a run has written down, read by somebody who does not carry it: from any storage, while it runs and afterwards.

Responsible for reading lines of which only the end is new, for the facts of a run, and for telling whether it runs, was stopped,
failed or is finished. It writes nothing. Not responsible for what is shown of it (runs.py, watch.py, doctor_run.py).
"""

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.health import HEALTH
from moco_ray.lease import EXPIRES_SECONDS, Sign, sign_of_life
from moco_ray.plan import Plan
from moco_ray.run_folder import FACTS, PLAN, RunFolder

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
END_BYTES = 4 << 20  # some thousand steps that were logged
COUNTERS = ("restarts", "steps_recomputed", "seconds_lost")
LAST_TIME = 4e9  # seconds since 1970
KNOWN_BYTES = 64  # before the end of what was read: are they as they were, the file has only grown


def _whole_metrics(entry: dict[str, Any]) -> bool:
    return all(isinstance(value, int | float) for value in entry.values())


def _whole_event(event: dict[str, Any]) -> bool:
    """With a kind, and numbers where the report counts; the time may be missing, but is one that a calendar has."""
    when, counters = event.get("wall_time", 0), [event.get(name, 0) for name in COUNTERS]
    numbers = all(isinstance(value, int | float) for value in (when, *counters))
    return numbers and 0 <= when < LAST_TIME and all(isinstance(event.get(name, ""), str) for name in ("kind", "text"))


WHOLE = {METRICS: _whole_metrics, EVENTS: _whole_event}


@dataclass
class Lines:
    """The entries of a file of JSON lines in the order of the file. `read()` fetches what has come since."""

    run: Store
    name: str
    entries: list[dict[str, Any]] = field(default_factory=list)
    unreadable: int = 0  # whole lines that are no JSON object with a step, or hold what no run writes there: left out
    cut: bool = False  # the file began before what was read
    _read_to: int = 0
    _known: bytes = b""

    def read_end(self) -> int:
        """The first reading, of a file that may be large: nothing of it but its last END_BYTES."""
        size = self.run.size(self.name) or 0
        if size > END_BYTES and not self._read_to:
            self._read_to, self.cut = size - END_BYTES, True
            self._read_to += self.run.read(self.name, self._read_to).find(b"\n") + 1  # the first is a part of a line
        return self.read()

    def read(self) -> int:
        """How many entries came. A last line without its end is being written: the next reading has it.

        A file that is no longer the beginning of itself (a run was repaired or put in place of another) is read anew.
        """
        size = self.run.size(self.name) or 0
        start = self._read_to - len(self._known)
        content = self.run.read(self.name, start) if size > start else b""
        if not content.startswith(self._known):
            self._read_to, self._known, self.entries, self.unreadable = 0, b"", [], 0
            content = self.run.read(self.name) if size else b""
        new = content[len(self._known) :]
        lines, end, _ = new.rpartition(b"\n")
        before = len(self.entries)
        for line in lines.splitlines():
            self._take(line)
        self._read_to += len(lines + end)
        self._known = (self._known + lines + end)[-KNOWN_BYTES:]
        return len(self.entries) - before

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict) and type(entry.get("step")) is int and WHOLE[self.name](entry):
            self.entries.append(entry)
        else:
            self.unreadable += 1


class State(NamedTuple):
    """How a run stands: "running", "finished", "stopped", "failed" or, where too little is known, "silent"."""

    word: str
    why: str = ""


@dataclass
class Record:
    """One run. `refreshed()` fetches what has changed; the rest is read when it is first asked for."""

    folder: RunFolder

    def __post_init__(self):
        self.metrics = Lines(self.folder.store, METRICS)
        self.events = Lines(self.folder.store, EVENTS)
        self.health: dict[str, Any] = {}  # as the driver wrote it; {} of a run that has none
        self.sign: Sign | None = None

    @classmethod
    def of(cls, place: str, end: bool = False) -> "Record":
        """The run that a user names, read once; with `end` of long records only the end. Raises UserError if it is none, or cannot be read."""
        return cls(RunFolder.existing(place)).refreshed(end)

    def refreshed(self, end: bool = False) -> Self:
        """Itself, with what has come since. Raises UserError if the storage cannot be read."""
        self.sign = sign_of_life(self.folder.store)  # first: what a run that has ended wrote is complete then
        for lines in (self.metrics, self.events):
            lines.read_end() if end else lines.read()
        self.health = self._health()
        return self

    @property
    def name(self) -> str:
        return self.folder.store.place("").rstrip("/").rpartition("/")[2]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """run.json: when it was begun, code, data. Raises UserError."""
        return _object(self.folder.store, FACTS)

    @cached_property
    def derived(self) -> dict[str, Any]:
        """plan.json: rows, steps, turns of the queue. Raises UserError."""
        held = _object(self.folder.store, PLAN)
        if not isinstance(held.get("total_steps"), int) or not isinstance(held.get("rows"), int):
            raise UserError(f"{self.folder.store.place(PLAN)} is damaged: it tells no rows or steps; put it back as it was")
        return held

    @cached_property
    def plan(self) -> Plan:
        """Of its recipe and rows. Raises UserError."""
        return Plan(self.folder.recipe(), self.derived["rows"])

    @property
    def training(self) -> list[dict[str, Any]]:
        """The entries with a loss."""
        return [entry for entry in self.metrics.entries if "loss" in entry]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The entries with a kNN accuracy, by step: one may land after a later one."""
        return sorted((entry for entry in self.metrics.entries if "knn_top1" in entry), key=lambda entry: entry["step"])

    @property
    def step(self) -> int:
        """The furthest that is written down."""
        return max((entry["step"] for entry in self.metrics.entries[-50:]), default=0)

    @property
    def saved(self) -> dict[str, Any] | None:
        """The event of the newest checkpoint that became whole."""
        return next((event for event in reversed(self.events.entries) if event.get("kind") == "saved"), None)

    @property
    def safe_step(self) -> int | None:
        """Of the newest checkpoint that became whole, 0 before the first; None of an earlier release's run, which has no events."""
        if not self.events.entries:
            return None
        return self.saved["step"] if self.saved else 0

    @property
    def written_at(self) -> float:
        """When the last line was written, in seconds since 1970 by the driver's clock; nan before the first."""
        times = [lines.entries[-1].get("wall_time") for lines in (self.metrics, self.events) if lines.entries]
        return max((float(time) for time in times if isinstance(time, int | float)), default=math.nan)

    def state(self, silent_seconds: float | None = None) -> State:
        """`silent_seconds`: for how long the lease has been watched without a change; None: it was seen to change.

        A lease tells by itself only if it was let go, or if its holder ran on this machine.
        """
        total = self.derived["total_steps"]
        saved = self.saved["step"] if self.saved else 0
        done = saved >= total or (self.saved is None and self.step >= total)
        sign = self.sign
        if sign is None or sign.released:
            return State("finished") if done else self._ended()
        if sign.alive or (sign.alive is None and silent_seconds is None):
            return State("running", f"by {sign.holder}")
        if done:
            return State("finished")
        if sign.alive is False:
            return State("failed", f"{sign.holder} carried it and has ended")
        word = "failed" if silent_seconds >= EXPIRES_SECONDS else "silent"
        return State(word, f"{sign.holder} carried it, and was not heard of for the last {silent_seconds:.0f} s")

    def _ended(self) -> State:
        """Of a driver that let go before the last step: by Ctrl-C, or because something stopped it."""
        for event in reversed(self.events.entries):
            if event.get("kind") in ("started", "continuing", "caught_up"):
                break
            if event.get("kind") == "worker_lost":
                return State("failed", str(event.get("text", "")))
        return State("stopped")

    def _health(self) -> dict[str, Any]:
        store = self.folder.store
        cure = "remove it: the run writes it anew, and `moco-ray doctor RUN` judges by the metrics"
        held = _object(store, HEALTH, cure) if store.size(HEALTH) is not None else {}
        verdicts = held.get("verdicts", [])
        if not isinstance(held.get("state", ""), str) or not isinstance(verdicts, list) or not all(map(_whole_verdict, verdicts)):
            raise UserError(f"{store.place(HEALTH)} is damaged: its state is no word, or its verdicts are none; {cure}")
        return held


def _whole_verdict(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("step", 0), int)


def _object(store: Store, name: str, cure: str = "put it back as it was") -> dict[str, Any]:
    try:
        held = json.loads(store.read(name))
        if isinstance(held, dict):
            return held
        cause = "it holds no object"
    except UserError:
        raise
    except ValueError as error:
        cause = f"{type(error).__name__}: {error}"
    raise UserError(f"{store.place(name)} is damaged ({cause}); {cure}")
