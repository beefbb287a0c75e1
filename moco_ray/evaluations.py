"""The driver's account of a run's evaluations: which checkpoint is due, what became of it, and which is the best so far.

Responsible for having due checkpoints evaluated beside the training, one at a time as a Ray task, for giving one up that takes
too long, for leaving what failed to the next driver, and for keeping them from being pruned meanwhile. Not responsible for the evaluation itself (beside.py), for what is
written and said of it (desk.py, events.py), nor for evaluations inside the training loop (train.py), of which it only hears.

Not Ray Train's own validation tasks: their queue lives in Ray Train's controller and is lost with it and with the driver, and that
one was given up is told to nobody. Here a new driver finds what the one before left undone.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import ray

from moco_ray import checkpoint
from moco_ray.beside import CLAIM_CPUS, evaluate_checkpoint
from moco_ray.data.on_ray import user_error
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.evaluate.features import LabelledSet
from moco_ray.plan import Plan
from moco_ray.session import Helpers
from moco_ray.standing import Best, Standing
from moco_ray.train import due

AGAIN_SECONDS = 20.0  # until an account that the storage did not take is written again
MOST_WAITING = 8  # checkpoints that are kept for it; with more, the oldest is given up
RAYS_ADVICE = "\nFailed to apply UDF transform"  # which Ray Data appends to what a task raised


class Outcome(NamedTuple):
    """Of one evaluation that ended."""

    step: int
    entry: dict[str, Any] | None  # for metrics.jsonl; None: there is none, and `why`
    why: str = ""
    again: bool = False  # whether its checkpoint is kept, for the next driver to try once more


class _Running(NamedTuple):
    name: str
    step: int
    task: ray.ObjectRef
    since: float  # monotonic


class Evaluations:
    """One driver's. The desk's thread alone calls its methods; what it is asked while somebody waits may be read by any."""

    def __init__(
        self,
        run: Store,
        plan: Plan,
        sets: tuple[LabelledSet, LabelledSet] | None,
        helpers: Callable[[], Helpers | None],
        evaluated: Collection[int],
    ):
        """`sets`: None for a run without evaluations. `helpers()`: what the cluster has for it now; None where training takes all,
        and evaluates itself. `evaluated`: steps of which there is a result, now and later.
        """
        self._run, self._plan, self._sets, self._helpers = run, plan, sets, helpers
        self.beside = sets is not None and helpers() is not None
        self._evaluated = evaluated
        self._running: _Running | None = None
        self.took_seconds: float | None = None  # the last one that was carried through; None: none yet
        self._failed: set[str] = set()  # of those that wait: for the next driver
        self._names: dict[int, str] = {}  # of the checkpoints written since, by step
        self._standing, self._given_up = Standing(), []
        self._written_at: float | None = None  # tried in vain at that time; None: the storage has the account as it is
        if sets is None:
            return
        there = checkpoint.whole(run)
        self._names = {saved.step: saved.name for saved in there}
        waiting = sorted(saved.step for saved in there if self._due(saved.step) and saved.step not in evaluated)
        best = Standing.read(run).best
        self._standing = Standing(best, tuple(self._names[step] for step in waiting) if self.beside else ())
        self._standing.write(run)

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting for this driver or at work."""
        return not self._own()

    @property
    def steps_waiting(self) -> list[int]:
        """The steps whose checkpoints this driver is still to evaluate."""
        return [step for step, name in sorted(self._names.items()) if name in self._own()]

    @property
    def left_seconds(self) -> float | None:
        """Until the last of them is done, if each takes as long as the last one did; None: that is not known."""
        if self.took_seconds is None:
            return None
        running = self._running  # the desk's thread may end it meanwhile
        begun = time.monotonic() - running.since if running else 0.0
        return max(0.0, len(self.steps_waiting) * self.took_seconds - begun)

    @property
    def best(self) -> Best | None:
        return self._standing.best

    def saved(self, step: int, attempt: int) -> None:
        """A checkpoint became whole."""
        if self._sets is None or not self._due(step):
            return
        again = step in self._names  # computed again after a restart: the first is as good
        name = checkpoint.name_of(step, attempt)
        self._names.setdefault(step, name)
        if self.beside and not again:
            self._change(waiting=(*self._standing.waiting, name))
            if len(self._standing.waiting) > MOST_WAITING:
                dropped = next(each for each in self._standing.waiting if not self._running or each != self._running.name)
                self._given_up.append(dropped)
                self._done_with(dropped)

    def landed(self, entry: dict[str, Any]) -> bool:
        """A result was written down. True if it is the best so far (and its checkpoint is kept, if there is one)."""
        step, top1 = entry["step"], entry["knn_top1"]
        better = self.best is None or top1 > self.best.knn_top1
        name = self._names.get(step)
        if better and name:
            self._change(best=Best(name, step, top1))
        if name in self._standing.waiting:
            self._done_with(name)
        return better

    def look(self) -> list[Outcome]:
        """What has ended since; begins the next. The caller writes results down and says `landed`, before it looks again."""
        found = [
            Outcome(self._step_of(name), None, f"{MOST_WAITING} later ones wait already; make evaluation.every_epochs longer")
            for name in self._given_up
        ]
        self._given_up = []
        self._write_if_due()
        if self._running is not None:
            outcome = self._outcome(self._running)
            if outcome is None:
                return found
            found.append(outcome)
            running, self._running = self._running, None
            if outcome.entry is None:
                found[-1] = self._put_off(running.name, outcome)
                return found
            self.took_seconds = time.monotonic() - running.since
        following = next((name for name in self._own() if not found or self._step_of(name) != found[-1].step), None)
        if following is not None and (helpers := self._helpers()) is not None:
            call = ray.remote(evaluate_checkpoint).options(num_cpus=CLAIM_CPUS, max_retries=1, **helpers.options)
            task = call.remote(self._run.uri, following, self._sets, helpers, not self._evaluated)  # the first tells what to compare with
            self._running = _Running(following, self._step_of(following), task, time.monotonic())
        elif following is not None:  # the GPUs that were left over are gone
            found.append(self._put_off(following, Outcome(self._step_of(following), None, "the cluster has no GPU left for it")))
        return found

    def close(self) -> None:
        """End what is at work; it waits for the next driver."""
        if self._running is not None:
            with contextlib.suppress(ray.exceptions.RayError):  # it may be gone
                ray.cancel(self._running.task, force=True)
            self._running = None

    def _own(self) -> list[str]:
        return [name for name in self._standing.waiting if name not in self._failed]

    def _put_off(self, name: str, outcome: Outcome) -> Outcome:
        """One that failed waits for the next driver, as long as its checkpoint is there."""
        try:
            there = self._run.size(f"{name}.json") is not None
        except UserError:
            there = True  # nobody knows; the next driver looks
        if there:
            self._failed.add(name)
        else:
            self._done_with(name)
        return outcome._replace(again=there)

    def _due(self, step: int) -> bool:
        return due(step, self._plan)[1]

    def _step_of(self, name: str) -> int:
        return next(step for step, own in self._names.items() if own == name)

    def _change(self, **values: Any) -> None:
        self._standing, self._written_at = self._standing._replace(**values), -math.inf
        self._write_if_due()

    def _write_if_due(self) -> None:
        """Now, or later if the storage is unwell: a run must not end for it."""
        if self._written_at is None or time.monotonic() - self._written_at < AGAIN_SECONDS:
            return
        try:
            self._standing.write(self._run)
            self._written_at = None
        except UserError:
            self._written_at = time.monotonic()

    def _done_with(self, name: str) -> None:
        self._change(waiting=tuple(each for each in self._standing.waiting if each != name))

    def _outcome(self, running: _Running) -> Outcome | None:
        """None while it is at work."""
        minutes = self._plan.recipe.evaluation.timeout_minutes
        ready, _ = ray.wait([running.task], timeout=0)
        if not ready:
            if time.monotonic() - running.since < 60 * minutes:
                return None
            ray.cancel(running.task, force=True)
            cure = "make evaluation.bank_rows smaller, or evaluation.timeout_minutes longer"
            return Outcome(running.step, None, f"it did not end in {minutes:g} minutes; {cure}")
        try:
            scalars = ray.get(running.task)
        except (ray.exceptions.RayError, UserError) as error:
            return Outcome(running.step, None, _in_a_line(error))
        return Outcome(running.step, {"step": running.step, "epoch": running.step / self._plan.steps_per_epoch, **scalars})


def _in_a_line(error: Exception) -> str:
    """What happened to a task, without Ray's tracebacks."""
    if (mistake := user_error(error)) is not None:
        return str(mistake)
    inner: BaseException = error
    while isinstance(inner, ray.exceptions.RayError) and (deeper := getattr(inner, "cause", None) or inner.__cause__) is not None:  # Ray Data's tasks are behind two
        inner = deeper
    lines = str(inner).partition(RAYS_ADVICE)[0].strip().splitlines() or [""]
    return f"{type(inner).__name__}: {lines[-1].strip()[:300]}"
