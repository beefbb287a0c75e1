"""The driver's side of a run: a thread that hears the ranks and the cluster, and has it written down and shown.

Responsible for what happens on each message, each second and at the end. Not responsible for the words (events.py), the
files (monitor.py) or the bar (progress.py), nor for starting workers (launch.py).
"""

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from moco_ray.cluster import ended_by, forget_pipelines, living, nodes_leaving, recount
from moco_ray.data.storage import one_line
from moco_ray.errors import NonFinite, UserError
from moco_ray.evaluations import Evaluations
from moco_ray.events import Events
from moco_ray.gauges import Gauges
from moco_ray.lease import Lease
from moco_ray.monitor import Journal
from moco_ray.pictures import Gallery
from moco_ray.plan import Plan
from moco_ray.progress import Progress
from moco_ray.session import Outlook
from moco_ray.stages import LINE_SECONDS
from moco_ray.verdicts import Verdict
from moco_ray.words import duration, plural
from moco_ray.worker import patience_seconds

LOOK_SECONDS = 1.0  # between two looks at the cluster
JOINED_SECONDS = 12.0  # that a new node is kept to ourselves, for a checkpoint to be written first
RECOUNT_SECONDS = 3.0  # so that an elastic run grows soon after a node has joined
FORGET_SECONDS = 30.0  # without a word of a pipeline, which speaks every 10 s
PICTURE_SECONDS = 5.0  # at the end, for pictures whose images are being fetched
WAITING_SECONDS = 30.0  # without workers, before a line says what is waited for

T = TypeVar("T")


class Desk:
    """`with Desk(...) as desk:` hears and writes until the block ends; all that was said before is written then."""

    def __init__(
        self,
        board,
        journal: Journal,
        progress: Progress,
        plan: Plan,
        lease: Lease,
        evaluations: Evaluations,
        outlook: Outlook,
        gallery: Gallery,
        gauges: Gauges,
    ):
        self._board, self._journal, self._progress, self._plan = board, journal, progress, plan
        self._lease, self._evaluations, self._outlook = lease, evaluations, outlook
        self._gallery, self._gauges = gallery, gauges
        self._nodes: list[str] = []  # ids, of this attempt's workers
        self._without_readers: bool | None = None  # whether no data node lives; None: not known since the workers began
        self.events = Events(self._happened, journal.last_step, journal.counters)
        self._heard = 0  # number of the last message
        self._seconds_a_step = 0.0
        self._without: set[str] = set()  # what failed of all that only looks at the run
        self._running, self._waiting_since, self._recounted = False, time.monotonic(), 0.0
        self._stopping, self._trained = "", False  # why; whether all steps are done
        self._forgot = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="desk", daemon=True)

    def __enter__(self) -> "Desk":
        self._thread.start()
        return self

    def __exit__(self, kind, error, *_) -> None:
        self._stop.set()
        self._thread.join()
        if isinstance(error, NonFinite):
            with contextlib.suppress(UserError):  # what stopped the run is the error to tell
                self._judge(lambda: self._journal.judge_not_finite(self.events.reached, str(error)))
        with contextlib.suppress(UserError):
            self._hang(PICTURE_SECONDS)

    def stop(self) -> bool:
        """Have the workers write a last checkpoint and end: the run then raises Stopped. False if none are at work. From any thread."""
        if not self._running or self._trained:
            return False
        self._stopping = "the run is asked to stop (SIGTERM)"
        self._order({"stop": self._stopping})
        return True

    def finish_evaluations(self) -> None:
        """Wait for those that are due still, each for its time at the most. Raises what stops the driver meanwhile."""
        self._trained = True
        told_at = -LINE_SECONDS
        while not self._evaluations.idle:
            if time.monotonic() - told_at >= LINE_SECONDS:
                told_at = time.monotonic()
                self._progress.say(self._waiting_for_evaluations())
            fatal = ray.get(self._board.fatal.remote(), timeout=60)
            if fatal is not None:
                raise fatal
            time.sleep(0.2)

    def _waiting_for_evaluations(self) -> str:
        steps, took, left = self._evaluations.steps_waiting, self._evaluations.took_seconds, self._evaluations.left_seconds
        many = f"{plural(len(steps), 'evaluation')} (of step {', '.join(map(str, steps))})"
        known = "" if took is None or left is None else f", about {duration(left)} left (the last took {duration(took)})"
        return f"all steps are done; waiting for {many}{known}. {ended_by()} ends it, and the same command again makes up for them"

    def _run(self) -> None:
        looked = 0.0
        while True:
            last_round = self._stop.is_set()
            try:
                for message in ray.get(self._board.take.remote(self._heard), timeout=10):
                    self._heard = message["number"]
                    self._hear(message)
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    self._look()
            except (ray.exceptions.RayError, TimeoutError):
                time.sleep(LOOK_SECONDS)  # Ray is ending, or the machine is busy: the trainer tells
            except UserError as error:
                self._fail(error)
            except Exception as error:  # noqa: BLE001  a fault of ours; unheard, the run would wait for ever
                traceback.print_exc()
                self._fail(UserError(f"the driver cannot go on: {error!r}; this is a fault in moco_ray. `moco-ray resume` goes on"))
            if last_round:
                return

    def _fail(self, error: UserError) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            ray.get(self._board.stop.remote(error), timeout=10)

    def _hear(self, message: dict[str, Any]) -> None:
        if "flush" in message:
            self._flush(message["flush"])
            return
        kind, events = message["kind"], self.events
        if kind == "record":
            self._record(message)
        elif kind == "begin":
            self._running, self._nodes, self._without_readers = True, message["node_ids"], None
            if self._stopping:
                self._order({"stop": self._stopping})
            events.begin(message)
            self._aside("environment", lambda: self._journal.begun(message["from_step"], message["code"], message["nodes"], message["hardware"]))
        elif kind == "failed":
            self._running, self._waiting_since = False, time.monotonic()
            if not self._stopping:  # then it is how they end
                events.failed(message["causes"])
        elif kind == "saved":
            interval = self._plan.recipe.run.checkpoint_every_steps
            self._recounted = min(self._recounted, time.monotonic())
            events.saved(message, self._seconds_a_step, interval if message["step"] < self._plan.total_steps else 0)
            self._progress.safe(events.safe_step)
            self._evaluations.saved(message["step"], message["attempt"])
        elif kind == "asking":
            self._happened("asking", events.reached, message["text"])
        elif kind == "pictures":
            self._aside("pictures", lambda: self._gallery.hang(message))
        elif kind == "no_picture":
            self._happened("no_picture", message["step"], f"no pictures of step {message['step']}: {message['why']}")
        elif kind == "profile":
            self._happened("profile", message["step"], message["text"], seconds=message["seconds"])
        elif kind == "no_profile":
            self._happened("no_profile", message["step"], f"no profile: {message['why']}; training goes on without")
        elif kind == "not_saved":
            events.not_saved(message)
        elif kind == "skipped":
            events.skipped(message)
        elif kind == "saving":
            self._happened("saving", message["step"], f"writing a checkpoint of step {message['step']}: {message['why']}")

    def _record(self, message: dict[str, Any]) -> None:
        entry = message["entry"]
        if "loss" in entry:
            self.events.at(entry["step"])
            self._seconds_a_step = self._plan.recipe.batch.global_batch_size / entry["images_per_second"]
            self.events.slow(message["slow"], entry["step"])
        new = self._journal.record(entry, message["bad"])
        if new and "loss" in entry:
            self._judge(lambda: self._journal.judge(entry))
        self._progress.show(entry, new)
        if new:
            self._aside("metrics for Ray", lambda: self._gauges.show({**entry, "verdicts": self._journal.verdict_count}))
        if "knn_top1" in entry and new:
            with contextlib.suppress(UserError):
                self._journal.sync()  # before its checkpoint is let go
            better = self._evaluations.landed(entry)
            self.events.evaluated(entry, self._evaluations.best, better)

    def _flush(self, number: int) -> None:
        failure = None
        try:
            self._journal.sync()
        except UserError as error:
            failure = error
        except OSError as error:
            failure = UserError(f"cannot write in {self._journal.folder}: {error.strerror or error}; make room or mend the storage")
        self._board.flushed.remote(number, failure)

    def _look(self) -> None:
        """At the lease, the ranks, the nodes and the clock."""
        if self._lease.lost.is_set():
            lost = UserError(self._lease.reason)
            self._journal.abandon(lost)
            self._fail(lost)
        if self._running:
            patience = patience_seconds(self._plan.recipe, self._seconds_a_step)
            self.events.pulses(ray.get(self._board.pulses.remote(), timeout=10), patience)
        leaving = {node: deadline for node, deadline in nodes_leaving().items() if node in self._nodes}
        if leaving:
            self._order({"leaving": leaving})
        joined = self.events.cluster(living())
        self._look_for_readers()
        if joined and self._running:  # Ray Train starts the workers anew as soon as it knows, and does not ask before
            self._order({"save": (f"node {joined[0]} joined", time.time())})
            self._recounted = time.monotonic() + JOINED_SECONDS
        if not self._running and time.monotonic() - self._waiting_since > WAITING_SECONDS:
            self._waiting_since = time.monotonic()
            self._happened("waiting", self.events.reached, f"no workers yet: {self._outlook.waiting()}")
        if time.monotonic() - self._recounted > RECOUNT_SECONDS:
            self._recounted = time.monotonic()
            with contextlib.suppress(ray.exceptions.RayError, ValueError, TimeoutError):
                recount()
        if time.monotonic() - self._forgot > FORGET_SECONDS:
            self._forgot = time.monotonic()
            forget_pipelines(FORGET_SECONDS)
        for outcome in self._evaluations.look():
            if outcome.entry is None:
                self.events.not_evaluated(outcome.step, outcome.why, outcome.again)
            else:
                self._record({"entry": outcome.entry, "bad": []})
        self._hang()
        self._journal.sync_if_due()

    def _look_for_readers(self) -> None:
        """Tell once that the data group is gone, if it was there when the workers began."""
        if self._running:
            gone = self._outlook.readers_gone(self._nodes)
            if gone and self._without_readers is False:
                self._happened("readers_gone", self.events.reached, gone)
            self._without_readers = bool(gone)

    def _order(self, orders: dict[str, Any]) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # the trainer tells
            self._board.order.remote(orders)

    def _hang(self, wait_seconds: float = 0.0) -> None:
        for pictures in self._aside("pictures", lambda: self._gallery.finished(wait_seconds)) or []:
            self._aside("pictures", lambda: self._journal.pictures(pictures.step, pictures.images, pictures.histograms))  # noqa: B023  called here
            if pictures.flaw:
                self._happened("no_picture", pictures.step, pictures.flaw)

    def _judge(self, look: Callable[[], list[Verdict]]) -> None:
        for verdict in self._aside("verdicts", look) or []:
            facts = verdict._asdict()
            self._happened("verdict", facts.pop("step"), verdict.text, **facts)
        self._aside("health.json", self._journal.write_health)

    def _aside(self, what: str, show: Callable[[], T]) -> T | None:
        """What `show` gives, which only looks at the run: a failure of it is told once, and costs the run nothing. None then."""
        try:
            return show()
        except Exception as error:  # noqa: BLE001  whatever it is
            if what not in self._without:
                self._without.add(what)
                self._happened("not_shown", self.events.reached, f"{what}: {one_line(error)}; training goes on without")
            return None

    def _happened(self, kind: str, step: int, text: str, **facts: Any) -> None:
        self._journal.event(kind, step, text, **facts)
        self._aside("metrics for Ray", lambda: self._gauges.show({**facts, "verdicts": self._journal.verdict_count}))
        self._progress.say(text)
