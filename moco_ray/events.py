"""What happens to a run, in plain words: one line an event, and the counters that go with it.

Responsible for turning what the ranks, the controller and the cluster say into lines ("lost node X at step s, continuing
with 3 workers from step s', 42 steps are computed again"). Not responsible for writing them (monitor.py), showing
them (progress.py) or for what is done about it (launch.py).
"""

import time
from collections.abc import Callable
from typing import Any

from moco_ray.board import Pulse
from moco_ray.standing import Best
from moco_ray.words import duration

HEARD_SECONDS = 3.0  # since the sign of life of another: else all were ended together, or the driver itself is slow
SILENT_SECONDS = 15.0  # without a sign of life, before a line names the rank
DIED = "its process died"  # as launch.py calls it
SLOW_RECORDS = 3  # in a row that call the same rank slow, before a line names it


class Events:
    """The story of one driver's time with a run. `tell(kind, step, text, **facts)` gets each line."""

    def __init__(self, tell: Callable[..., None], reached: int = 0, before: dict[str, Any] | None = None):
        """`reached`: the last step that an earlier driver wrote down; `before`: its counters."""
        self._tell, before = tell, before or {}
        self.workers, self.reached, self.safe_step = 0, reached, 0
        self.restarts, self.recomputed = before.get("restarts", 0), before.get("steps_recomputed", 0)
        self.seconds_lost = before.get("seconds_lost", 0.0)
        self.nodes: dict[str, str] = {}  # living: id to name
        self._gone: list[str] = []  # names, since the last attempt began
        self._places: list[str] = []  # node of each rank of this attempt
        self._down_at: float | None = None  # when the last step was heard of, before a restart
        self._last_step_at, self._catch_up = time.time(), 0
        self._silent: set[int] = set()
        self._slow = (-1, 0)  # rank, records in a row
        self._failed = False  # and not begun again

    @property
    def counters(self) -> dict[str, Any]:
        return {"restarts": self.restarts, "steps_recomputed": self.recomputed, "seconds_lost": self.seconds_lost}

    def begin(self, message: dict[str, Any]) -> None:
        """The workers stand at a checkpoint and are about to train."""
        self._begin(message)
        if len(self.nodes) > 1:
            self._tell("placed", message["from_step"], message["seating"])

    def _begin(self, message: dict[str, Any]) -> None:
        before, start, self.workers = self.workers, message["from_step"], len(message["nodes"])
        self._places, self._silent, self._slow = message["nodes"], set(), (-1, 0)
        for text in message["skipped"]:
            self._tell("skipped_checkpoint", start, text)
        self.safe_step, self._failed = start, False
        again = max(0, self.reached - start)
        recomputed = f"{_steps(again)} {'is' if again == 1 else 'are'} computed again" if again else "no step is lost"
        if not before:
            self.recomputed += again
            cost = f", {recomputed}" if start and again else ""  # an earlier driver may have done more than it could write
            self._tell(
                "started",
                start,
                f"{_workers(self.workers)} from step {start}{cost}{self._spread()}",
                workers=self.workers,
                **self.counters,
            )
            self.reached = max(self.reached, start)
            self._last_step_at = time.time()
            return
        self.restarts += 1
        self.recomputed += again
        self._down_at = self._down_at or self._last_step_at
        self._catch_up = self.reached
        cause = f"lost {' and '.join(self._gone)}: " if self._gone else "" if before == self.workers else "the cluster changed: "
        change = f"continuing with {_workers(self.workers)}" + (f" ({before} before)" if before != self.workers else "")
        down = time.time() - self._down_at
        self._tell(
            "continuing",
            start,
            f"{cause}{change} from step {start}, {recomputed} ({down:.1f} s without a step){self._spread()}",
            workers=self.workers,
            **self.counters,
        )
        self._gone = []

    def failed(self, causes: dict[int, str]) -> None:
        """Workers died or raised; a restart follows, or the end."""
        self._failed = True
        if self._down_at is None:
            self._down_at = self._last_step_at
        died = [rank for rank, cause in causes.items() if cause == DIED]  # what others say is of them
        ranks = sorted(died or [min(causes)])
        who = f"worker {', '.join(map(str, ranks))}{self._where(ranks)}"
        what = "died" if died else f"failed: {causes[ranks[0]]}"
        self._tell("worker_lost", self.reached, f"{who} {what}; step {self.reached} was reached")

    def cluster(self, nodes: dict[str, str]) -> list[str]:
        """The living nodes as they are now, id to name. Returns the names of those that joined."""
        lost = [name for key, name in self.nodes.items() if key not in nodes]
        joined = [name for key, name in nodes.items() if key not in self.nodes] if self.nodes else []
        self.nodes = nodes
        for name in lost:
            self._gone.append(f"node {name}")
            self._tell("node_lost", self.reached, f"lost node {name} at step {self.reached}")
        for name in joined:
            self._tell("node_joined", self.reached, f"node {name} joined at step {self.reached}")
        return joined

    def pulses(self, pulses: dict[int, Pulse], patience_seconds: float) -> None:
        """What is heard of the ranks: how far they are, and who is silent."""
        for rank, pulse in pulses.items() if not self._gone else ():  # a lost node explains the silence
            if pulse.age_seconds < SILENT_SECONDS:
                self._silent.discard(rank)
            elif rank not in self._silent and any(other.age_seconds < HEARD_SECONDS for other in pulses.values()):
                self._silent.add(rank)
                self._tell(
                    "silent",
                    pulse.step,
                    f"worker {rank}{self._where([rank])} has not been heard of for {pulse.age_seconds:.0f} s, at step {pulse.step}; "
                    f"the others wait for it, and start again without it after {duration(patience_seconds)}",
                )
        if pulses:
            self.at(max(pulse.step for pulse in pulses.values()))

    def at(self, step: int) -> None:
        """A completed step that was heard of."""
        if self._failed:  # what was on its way still
            self.reached = max(self.reached, step)
            return
        if self._down_at is not None and step > min(self._catch_up, self.safe_step):
            if step >= self._catch_up:
                lost = time.time() - self._down_at
                self.seconds_lost += lost
                self._down_at = None
                self._tell("caught_up", step, f"back at step {step}: {lost:.1f} s lost", **self.counters)
        if step > self.reached:
            self.reached, self._last_step_at = step, time.time()

    def slow(self, slow: dict[str, Any] | None, step: int) -> None:
        """A record's verdict on who holds the others up."""
        rank, count = self._slow
        if slow is None:
            self._slow = (-1, 0)
            return
        count = count + 1 if slow["rank"] == rank else 1
        self._slow = (slow["rank"], count)
        if count == SLOW_RECORDS:
            waits = slow["input_wait_share"]
            why = f"it waits for images {waits:.0%} of the time" if waits > 0.2 else "it computes slowly"
            self._tell(
                "slow",
                step,
                f"worker {slow['rank']}{self._where([slow['rank']])} is slow, {why}; the others wait for it {slow['others_wait_share']:.0%} of theirs",
            )

    def saved(self, message: dict[str, Any], step_seconds: float, interval: int) -> None:
        """A checkpoint became whole: what it took, and what a failure would cost now."""
        step = message["step"]
        self.safe_step = max(self.safe_step, step)
        cost = f"a failure now costs {_steps(max(0, self.reached - step))}"
        if interval and step_seconds:
            cost += f", before the next one at most {interval} ({duration(interval * step_seconds)})"
        self._tell(
            "saved",
            step,
            f"checkpoint of step {step} is safe ({_megabytes(message['bytes'])} in {message['seconds']:.1f} s, the step waited "
            f"{message['seconds_waited']:.2f} s for the copy); {cost}",
            seconds=message["seconds"],
            seconds_waited=message["seconds_waited"],
        )

    def evaluated(self, entry: dict[str, Any], best: Best | None, better: bool) -> None:
        """The backbone of a step was judged."""
        text = f"kNN {entry['knn_top1']:.1%} top-1, features of the backbone of step {entry['step']}"
        if "evaluation_seconds" in entry:
            text += f" ({duration(entry['evaluation_seconds'])} beside the training)"
        if "knn_untrained" in entry:
            text += f"; {entry['knn_untrained']:.1%} of the untrained network"
        if better:
            text += "; the best so far" + (f", kept: {best.name}.pt" if best and best.step == entry["step"] else "")
        elif best:
            text += f"; the best is {best.knn_top1:.1%} of step {best.step}"
        self._tell("evaluated", entry["step"], text)

    def not_evaluated(self, step: int, why: str, again: bool) -> None:
        """It was not; training goes on. `again`: the next driver tries it once more."""
        cure = "; its checkpoint is kept, and `moco-ray resume` or the same command again makes up for it" if again else ""
        self._tell("not_evaluated", step, f"no kNN of step {step}: {why}{cure}")

    def not_saved(self, message: dict[str, Any]) -> None:
        """One could not be written; training goes on."""
        at_stake = self.reached - self.safe_step
        self._tell(
            "not_saved", message["step"], f"{message['why']}. Training goes on; a failure now costs {_steps(at_stake)}"
        )

    def skipped(self, message: dict[str, Any]) -> None:
        """One was due while the one before was still being written."""
        self._tell(
            "save_skipped",
            message["step"],
            f"no checkpoint of step {message['step']}: the one before is still being written; a failure now costs "
            f"{_steps(max(0, self.reached - self.safe_step))}. Make run.checkpoint_every_steps longer, or the storage faster",
        )

    def _where(self, ranks: list[int]) -> str:
        places = sorted({self._places[rank] for rank in ranks if rank < len(self._places)})
        return f" on {', '.join(places)}" if places else ""

    def _spread(self) -> str:
        counts = {place: self._places.count(place) for place in self._places}
        if len(counts) < 2:
            return ""
        return " on " + ", ".join(f"{place} ({count})" if count > 1 else place for place, count in counts.items())


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
