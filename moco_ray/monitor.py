"""What a run tells, written down: scalars and events to TensorBoard and JSON lines, and the quarantine list.

One writer: the driver, who alone holds the run's lease (lease.py), so that a worker that was cut off cannot write into
them. Not here: what is measured (train.py, meter.py), how TensorBoard shows it (tensorboard_page.py), how pictures come about
(pictures.py), and what is said at the terminal (progress.py, events.py).
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from moco_ray.data.batch import BadRow
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.evaluate.curves import draw_curves
from moco_ray.health import HEALTH, Health
from moco_ray.plan import Plan
from moco_ray.tensorboard_page import (
    TAGS,
    environment_text,
    events_text,
    picture,
    recipe_text,
    references,
    summaries,
    verdicts_text,
)
from moco_ray.verdicts import Verdict

# Times, rates, who carried the step, and what counts from a start of the workers on
NOT_REPRODUCIBLE = (
    "images_per_second", "input_wait_share", "peak_memory_bytes", "workers", "attempt", "wall_time", "evaluation_seconds",
    "drift", "duplicate_share",
)  # fmt: skip
JSON_LINES = ("metrics.jsonl", "quarantine.jsonl", "events.jsonl")
SYNC_SECONDS = 20.0  # between two copies to object storage; longer once the files are large
BYTES_A_SECOND = 1 << 20  # that these copies may take of the network, on average
SHOWN_EVENTS = 40  # in TensorBoard; all are in events.jsonl
EVENT_FILE_BYTES = 4 << 20  # a new TensorBoard file after so many: object storage cannot append


class Journal:
    """The written record of a run, one line a step and kind, however often the step is computed.

    In a local run folder it appends in place. For any other storage it writes into a temporary folder, and `sync` copies
    what has changed. `sync` is what makes it durable: a checkpoint is complete only after it.
    """

    def __init__(self, run: Store, plan: Plan, safe_step: int, confirm: Callable[[], None] = lambda: None):
        """`safe_step`: of the newest checkpoint, up to which the record was complete when that was written.

        `confirm()` raises UserError if another process writes this record by now; called before anything is written.
        """
        self._run, self._plan, self._confirm = run, plan, confirm
        self.folder = Path(run.uri) if run.is_local else Path(tempfile.mkdtemp(prefix="moco-ray-"))
        self._sent: dict[str, int] = {}  # bytes of each file that the storage has
        self._broken: UserError | None = None
        self._synced_at, self._unsent_bytes = time.monotonic(), 0
        if not run.is_local:
            self._fetch()
        entries = _repair(self.folder / "metrics.jsonl")
        self.last_step = max((e["step"] for e in entries if "loss" in e), default=0)
        events = _repair(self.folder / "events.jsonl")
        self._verdicts = [event for event in events if event.get("kind") == "verdict" and event.keys() >= set(Verdict._fields)]
        self._health = Health(self.folder, plan, entries, self._verdicts)
        self.counters = next((e for e in reversed(events) if "restarts" in e), {})
        self.evaluated = {e["step"] for e in entries if "knn_top1" in e}
        # Bad rows are written before the line that counts them: those of a line that never came are taken back.
        _repair(self.folder / "quarantine.jsonl", self.last_step)
        self._furthest = 0
        self._untrained = next((entry["knn_untrained"] for entry in entries if "knn_untrained" in entry), None)
        self._open_writers(safe_step + 1)  # takes back points that a driver which died may or may not have written ..
        self._story = deque(events, maxlen=SHOWN_EVENTS)
        for lines, draw in ((entries, self._draw), (events, self._draw_counters)):
            for line in lines:
                if line["step"] > safe_step:  # .. and writes them again from the lines that are there
                    draw(line)
        self._pictured = safe_step  # the last step with pictures: none is computed before it any more
        self._introduce(safe_step)

    def record(self, entry: dict[str, Any], bad: list[tuple[int, BadRow]]) -> bool:
        """One set of scalars at entry["step"], and the bad rows since the one before. False if it was written before.

        A step that is computed again after a restart gives the same numbers, but for the order of sums: the first stay.
        """
        if entry["step"] in self.evaluated if "knn_top1" in entry else entry["step"] <= self.last_step:
            return False
        listed = [self._quarantined(epoch, row) for epoch, row in bad]  # a record may begin before the last one ended
        self._append("quarantine.jsonl", [row for row in listed if row["step"] > self.last_step])
        entry = {**entry, "wall_time": time.time()}
        self._append("metrics.jsonl", [entry])
        if "knn_top1" in entry:
            self.evaluated.add(entry["step"])
        else:
            self.last_step = entry["step"]
        self._draw(entry)
        if "knn_top1" in entry:  # may lie behind a checkpoint, from which on a new driver draws again
            self._writers["run"].flush()
        return True

    def judge(self, entry: dict[str, Any]) -> list[Verdict]:
        """What a record that was written raises, to be told."""
        return self._health.look(entry)

    def judge_not_finite(self, step: int, why: str) -> list[Verdict]:
        """The same of a run that stopped itself."""
        return self._health.stopped_not_finite(step, why)

    def write_health(self) -> None:
        """health.json as of the last record that was judged. Raises OSError."""
        if self._broken is None:  # else the run is another's
            self._sent.pop(HEALTH, None)  # may change and keep its size
            self._health.write()

    def event(self, kind: str, step: int, text: str, **facts: Any) -> None:
        """Something happened: one line of plain words, and the counters as they are now."""
        line = {"wall_time": time.time(), "kind": kind, "step": step, "text": text, **facts}
        self._append("events.jsonl", [line])
        self._draw_event(line)

    def begun(self, step: int, code: dict[str, Any], nodes: list[str], hardware: list[str]) -> None:
        """Workers began on these nodes, one name and one description each, with this code (run_folder.code_version)."""
        self._writers["run"].add_text("environment", environment_text(code, nodes, hardware), max(step, self._furthest))

    def pictures(self, step: int, images: dict[str, tuple[bytes, int, int]], histograms: dict[str, dict[str, Any]]) -> None:
        """Of a step, by tag: images (JPEG, height, width), histograms (what SummaryWriter.add_histogram_raw takes)."""
        if step <= self._pictured or self._broken is not None:  # a restart computed it again, or the run is another's
            return
        self._pictured = step
        for tag, (jpeg, height, width) in images.items():
            self._writers["run"].file_writer.add_summary(picture(tag, jpeg, height, width), step)
        for tag, counts in histograms.items():
            self._writers["run"].add_histogram_raw(tag, **counts, global_step=step)

    @property
    def verdict_count(self) -> int:
        """How many were raised so far, by any driver."""
        return len(self._verdicts)

    def sync(self) -> None:
        """Bring all that was written to the storage. Raises UserError if it does not take it; nothing is lost then.

        Raises too, from then on, if a line could not be written at all: no checkpoint may run ahead of such a hole.
        """
        if self._broken is not None:
            raise self._broken
        self._confirm()
        for writer in self._writers.values():
            writer.flush()
        self._synced_at, self._unsent_bytes = time.monotonic(), 0
        if self._run.is_local:
            for name in JSON_LINES:
                _to_disk(self.folder / name)
            return
        for path in sorted(p for p in self.folder.rglob("*") if p.is_file()):
            name, size = path.relative_to(self.folder).as_posix(), path.stat().st_size
            if self._sent.get(name) != size:
                content = path.read_bytes()
                self._run.write(name, content)
                self._sent[name] = len(content)
                self._unsent_bytes += len(content)
        for kind, writer in list(self._writers.items()):  # what is sent again whole at each copy must stay small
            if sum(p.stat().st_size for p in self._event_files(writer)[-1:]) > EVENT_FILE_BYTES:
                writer.close()
                _wait_for_a_new_second(Path(writer.log_dir))
                self._writers[kind] = SummaryWriter(writer.log_dir, flush_secs=20)

    def sync_if_due(self) -> None:
        """`sync`, every now and then; what it cannot write now it tries again next time."""
        wait = max(SYNC_SECONDS, self._unsent_bytes / BYTES_A_SECOND)
        if time.monotonic() - self._synced_at > wait:
            with contextlib.suppress(UserError):
                self.sync()

    def draw(self, title: str) -> None:
        """Draw curves.png from all lines."""
        self._confirm()
        draw_curves(self.folder / "metrics.jsonl", self.folder / "curves.png", title)
        self.sync()

    def abandon(self, why: UserError) -> None:
        """Write nothing more: the run is another's now."""
        self._broken = why

    def close(self) -> None:
        """Sync a last time, as far as the storage lets."""
        with contextlib.suppress(UserError, OSError):  # what stopped the run is the error to tell
            self.sync()
        with contextlib.suppress(OSError):
            for writer in self._writers.values():
                writer.close()
        if not self._run.is_local:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open_writers(self, purge: int) -> None:
        """TensorBoard reads files in the order of their names, which begin with the second in which they were opened."""
        folder = self.folder / "tensorboard"
        _wait_for_a_new_second(folder)
        self._writers = {
            "run": SummaryWriter(str(folder), purge_step=purge, flush_secs=20),
            # A second small run under the same tags, so that what to compare with, as chance, is a line beside the loss.
            "reference": SummaryWriter(str(folder / "reference"), purge_step=purge, flush_secs=20),
        }

    def _introduce(self, step: int) -> None:
        """What TensorBoard shows of a run before its first step, or of one that goes on from `step`."""
        for summary in summaries(self._plan):
            self._writers["run"].file_writer.add_summary(summary, step)
        self._writers["run"].add_text("recipe", recipe_text(self._plan), step)
        self._writers["run"].add_text("events/verdicts", verdicts_text(self._verdicts), max(step, self._furthest))

    def _event_files(self, writer: SummaryWriter) -> list[Path]:
        return sorted(Path(writer.log_dir).glob("events.*"), key=lambda path: path.stat().st_mtime_ns)

    def _draw(self, entry: dict[str, Any]) -> None:
        self._furthest = max(self._furthest, entry["step"])
        where = {"global_step": entry["step"], "walltime": entry.get("wall_time")}
        for name, tag in TAGS.items():
            if name in entry:
                self._writers["run"].add_scalar(tag, entry[name], **where)
        self._untrained = entry.get("knn_untrained", self._untrained)  # measured once, compared with always
        for tag, value in references({"knn_untrained": self._untrained, **entry}, self._plan).items():
            self._writers["reference"].add_scalar(tag, value, **where)
        if "loss" in entry:
            raised = sum(verdict["step"] <= entry["step"] for verdict in self._verdicts)
            self._writers["run"].add_scalar(TAGS["verdicts"], raised, **where)  # a flat 0 is what a healthy run shows

    def _draw_event(self, line: dict[str, Any]) -> None:
        """One text that tells the last of what happened: TensorBoard shows of a step, and of those behind it, the newest only."""
        self._story.append(line)
        self._draw_counters(line)
        self._writers["run"].add_text("events", events_text(self._story), self._furthest, line["wall_time"])
        if line["kind"] == "verdict":
            self._verdicts.append(line)
            self._writers["run"].add_text("events/verdicts", verdicts_text(self._verdicts), self._furthest, line["wall_time"])

    def _draw_counters(self, line: dict[str, Any]) -> None:
        self._furthest = max(self._furthest, line["step"])  # a restart's line is of an earlier step; no curve goes back
        for name in ("restarts", "steps_recomputed", "seconds_lost"):
            if name in line:
                self._writers["run"].add_scalar(TAGS[name], line[name], self._furthest, line.get("wall_time"))

    def _append(self, name: str, entries: list[dict[str, Any]]) -> None:
        if self._broken is not None or not entries:
            return
        if self._run.is_local:  # else a folder of our own
            self._confirm()
        path, lines = self.folder / name, "".join(json.dumps(entry) + "\n" for entry in entries)
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a") as file:
                file.write(lines)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(path, size)  # of a line none or all
            self._broken = UserError(
                f"cannot write in {self.folder}: {error.strerror or error}; make room or mend the storage, then resume"
            )
            raise self._broken from error

    def _quarantined(self, epoch: int, row: BadRow) -> dict[str, Any]:
        step = epoch * self._plan.steps_per_epoch + row.position // self._plan.recipe.batch.global_batch_size
        return {"step": step + 1, "epoch": epoch, **row._asdict()}

    def _fetch(self) -> None:
        for name in JSON_LINES:
            if self._run.size(name) is not None:
                content = self._run.read(name)
                (self.folder / name).write_bytes(content)
                self._sent[name] = len(content)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a file of JSON lines; a last line cut off by a crash is left out. [] if there is none."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            entries.append(json.loads(line))
    return entries


def _repair(path: Path, last_step: float = math.inf) -> list[dict[str, Any]]:
    """The entries of a file up to `last_step`, which from now on holds them alone, each with its end of line."""
    entries = [entry for entry in read_metrics(path) if entry["step"] <= last_step]
    whole = "".join(json.dumps(entry) + "\n" for entry in entries)
    if path.exists() and path.read_text() != whole:
        part = path.with_suffix(".part")
        part.write_text(whole)
        os.replace(part, path)
    return entries


def _wait_for_a_new_second(folder: Path) -> None:
    """Until a file opened now sorts behind those that are there; not for long, if another machine's clock is ahead."""
    last, now = max((int(path.name.split(".")[3]) for path in folder.rglob("events.*")), default=0), time.time()
    if last >= int(now):
        time.sleep(min(last + 1 - now, 2.0))


def _to_disk(path: Path) -> None:
    if path.exists():
        with path.open("rb") as file:
            os.fsync(file.fileno())
