"""One rank of a run: puts ranks, data, learner, checkpoints and messages together, and trains.

Called by Ray Train in each of its processes (launch.py); what it needs of Ray Train comes in as functions. Not responsible
for what a step does (train.py) nor for starting and restarting workers.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from moco_ray import attempts, checkpoint
from moco_ray.attempts import Attempt
from moco_ray.board import FLUSH_SECONDS, Wire, new_attempt
from moco_ray.data import order
from moco_ray.data.batch import Batch
from moco_ray.data.begun import Begun
from moco_ray.data.segment import Source
from moco_ray.data.shards import Manifest
from moco_ray.data.storage import one_line
from moco_ray.data.stream import batches
from moco_ray.data.whereabouts import rows_of_slots
from moco_ray.errors import Stopped, StorageFailing, UserError
from moco_ray.evaluate.features import LabelledSet, watch_knn
from moco_ray.exhibit import Step, exhibit
from moco_ray.learner import Learner
from moco_ray.lookout import Advice, Lookout, News, Notice
from moco_ray.meter import Meter
from moco_ray.method.encoder import refuse_emulated_precision, use_float32_of
from moco_ray.method.queue import Queue
from moco_ray.parts import Parts
from moco_ray.placement import DataPlace, seating
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.run_folder import RunFolder, code_version
from moco_ray.saver import OUTAGE_SECONDS, Saver
from moco_ray.step_profile import StepProfile, is_written, name_of
from moco_ray.train import Outputs, due, train

FIRST_STEPS_SECONDS = 1800.0  # that ranks wait for each other until the second step is done
STEPS_OF_PATIENCE = 20  # a rank is given up after so many times a step, if that is longer than the recipe says
HALT_SECONDS = 60.0  # after the time at which a machine was to be taken away, until the loop goes on all the same


@dataclass(frozen=True)
class Job:
    """What every rank of a run is told by the driver."""

    run: str  # URI of the run folder
    asked: str  # --workers
    board: Any  # see board.py
    driver: str  # name of the driver's node
    sets: tuple[LabelledSet, LabelledSet] | None  # bank and queries of evaluations in the loop; None: there are none
    profile_steps: int = 0  # of which a trace is asked for; 0: none
    first_attempt: int = 0  # of this driver: the trace is wanted once, not after each restart


class Node(NamedTuple):
    """A machine, as Ray knows it and as people do."""

    id: str
    name: str
    hardware: str = ""  # what computes there


@dataclass(frozen=True)
class Place:
    """Where a rank finds itself, and what Ray knows of it."""

    device: torch.device
    node: Node
    threads: int
    data_place: Callable[[list[str]], DataPlace]  # where this rank's data tasks run now, beside workers on these nodes (ids)
    point: Callable[[checkpoint.Saved, bool], None]  # tells Ray of a whole checkpoint; True on rank 0; a collective


def carry(job: Job, place: Place) -> None:
    """Train from the newest checkpoint to the end of the run. Raises what stops this rank.

    An error that no restart can cure is told to the driver first, for Ray would start the workers again.
    """
    if place.device.type == "cpu":
        torch.set_num_threads(place.threads)
    ranks = Ranks.current(place.device)
    number = ranks.gather_objects(new_attempt(job.board) if ranks.is_first else None)[0]
    wire = Wire(job.board, number, ranks.rank)
    try:
        _Rank(job, place, ranks, wire, number).train()
    except StorageFailing:
        raise  # it may pass: the workers start again from the newest checkpoint, and the driver counts
    except UserError as error:
        wire.fail(error)
        raise
    finally:
        wire.close()


class _Rank:
    """One rank of one attempt."""

    def __init__(self, job: Job, place: Place, ranks: Ranks, wire: Wire, attempt: int):
        self._folder, self._place, self._ranks, self._wire, self._attempt = _shared(job.run, place), place, ranks, wire, attempt
        self._recipe, self._manifest, self._job = self._folder.recipe(), self._folder.manifest(), job
        refuse_emulated_precision(self._recipe.encoder, place.device)
        use_float32_of(self._recipe.encoder)
        self._plan = Plan(self._recipe, self._manifest.rows)
        self._plan.refuse_world(ranks.world)
        self._about = about(self._recipe, self._manifest, self._plan)
        self._order = Source(self._manifest, self._recipe, self._plan).order
        self._nodes = ranks.gather_objects(place.node)
        self._data = partial(place.data_place, [node.id for node in self._nodes])
        fresh = checkpoint.newest(self._folder.store) is None
        self._rows = self._read_from(0) if fresh else None  # while the model is built
        self._learner = Learner.new(self._recipe, place.device)

    def train(self) -> None:
        """From the newest checkpoint to the last step. Collective."""
        learner, ranks, recipe = self._learner, self._ranks, self._recipe
        saved, skipped = restore(learner, self._folder, self._about, ranks)
        rows: Iterator[Batch] = self._rows if self._rows and saved is None else self._read_from(learner.step)
        if recipe.encoder.warm_start and saved is None:
            from moco_ray.warm_start import warm_start  # a second of imports that a restart need not wait for

            warm_start(learner, self._folder, recipe)
        self._own_order: tuple[str, float] | None = None
        self._wire.step = learner.step
        self._began_at = began_at(self._folder, learner.step, ranks)
        self._register(saved, skipped, self._data())
        self._meter = Meter(self._plan, ranks, learner.step)
        self._saver = Saver(self._write, self._wire.tell)
        wire = self._wire
        news = News(self._notice, lambda: self._own_order or wire.orders.get("save"), self._saver.take_newest, lambda: wire.orders.get("stop", ""))
        self._lookout = Lookout(ranks, news, recipe.run.checkpoint_every_minutes, learner.step)
        self._began, self._first_step, self._advice, self._patience_seconds = 0.0, learner.step, Advice(), FIRST_STEPS_SECONDS
        self._parts = Parts(self._place.device)
        self._profile = self._asked_profile()
        ranks.expect_answers_within(FIRST_STEPS_SECONDS)
        try:
            evaluate = self._evaluate if self._job.sets else None
            outputs = Outputs(self._record, self._save, evaluate, self._completed, self._rows_of_slots, self._picture, self._parts)
            train(learner, self._meter.timed(rows), self._plan, ranks, outputs)
        finally:
            self._saver.close()
            if self._profile:
                self._profile.close()

    def _read_from(self, step: int) -> Iterator[Batch]:
        """This rank's batches from that step on; reading begins now."""
        ranks = self._ranks
        return Begun(batches(self._manifest, self._recipe, self._plan, ranks.world, ranks.rank, step, self._data))

    def _asked_profile(self) -> StepProfile | None:
        """On rank 0, where one is asked for and this driver's workers have not written it before a restart."""
        run, steps = self._folder.store, self._job.profile_steps
        if not steps or not self._ranks.is_first or is_written(run, self._job.first_attempt):
            return None

        def written(first: int, trace: bytes) -> str:
            name = name_of(self._attempt, first)
            run.write(name, trace)
            return run.place(name)

        return StepProfile(steps, self._parts, self._learner.step, self._plan.total_steps, written, self._wire.tell)

    def _register(self, saved: checkpoint.Saved | None, skipped: list[str], data: DataPlace) -> None:
        """Say who carries the run from here on, and where. Collective: no rank trains before it is in the storage."""
        nodes, driver = self._nodes, self._job.driver
        names, failure, code = [node.name for node in nodes], None, code_version() if self._ranks.is_first else {}
        if self._ranks.is_first:
            self._wire.refuse_superseded()
            name = saved.name if saved else ""
            try:
                attempts.register(
                    self._folder.store,
                    Attempt(self._attempt, self._learner.step, self._ranks.world, self._job.asked, name, names, code, data.words, driver),
                )
            except UserError as error:
                failure = error
            where = {"nodes": names, "node_ids": [node.id for node in nodes], "hardware": [node.hardware for node in nodes], "code": code}
            seats = seating(names, data, driver)
            self._wire.tell(kind="begin", from_step=self._learner.step, skipped=skipped, seating=seats, **where)
            if saved and not failure and saved not in checkpoint.whole(self._folder.store):
                # A worker that was cut off wrote one more before this attempt was known, and pruned this one for it.
                self._own_order = ("the checkpoint that this attempt began from is gone", time.time())
        _raise_on_all(failure, self._ranks)

    def _record(self, entry: dict[str, Any], bad: list) -> None:
        slow = None
        if "loss" in entry:
            scalars, slow = self._meter.rates(entry["step"])
            entry = {**entry, **scalars, "attempt": self._attempt}
        if self._ranks.is_first:
            self._wire.tell(kind="record", entry=entry, bad=bad, slow=slow and slow._asdict())

    def _picture(self, step: Step) -> None:
        if not self._ranks.is_first:
            return
        try:
            shown = exhibit(step, self._plan)
        except Exception as error:  # noqa: BLE001  whatever it is, it costs the picture and not the run
            self._wire.tell(kind="no_picture", step=self._learner.step + 1, why=one_line(error))
            return
        if shown:
            self._wire.tell(kind="pictures", step=self._learner.step + 1, **shown)

    def _save(self, learner: Learner) -> None:
        advice, self._advice, self._own_order = self._advice, Advice(), None
        wait, must = learner.step >= self._plan.total_steps or bool(advice.halt_until) or advice.stop, bool(advice.save)
        must = must or due(learner.step, self._plan)[1]  # it is to be evaluated
        with self._meter.paused():
            refuse_different_queues(learner, self._ranks)
            self._lookout.saved()
            if wait:  # for rank 0, and the storage
                self._ranks.expect_answers_within(2 * FLUSH_SECONDS + OUTAGE_SECONDS)
            if self._ranks.is_first:
                self._saver.save(learner.step, learner.state_dict(), wait, must)
            if wait:  # for what follows may be the end of these processes
                self._ranks.gather_objects(None)
                self._ranks.expect_answers_within(self._patience_seconds)
            if advice.halt_until:
                self._halt(advice.halt_until)
        if advice.stop and learner.step < self._plan.total_steps:
            raise Stopped(f"stopped at step {learner.step}, whose checkpoint is safe; the same command goes on from there")

    def _write(self, step: int, state: dict[str, Any]) -> checkpoint.Saved:
        """In the saver's thread: the record of all steps so far first, so that a checkpoint never runs ahead of it."""
        self._wire.flush()
        content = checkpoint.pack(state, self._about)
        self._wire.refuse_superseded()
        run, keep = self._folder.store, self._recipe.run.keep_checkpoints
        return checkpoint.save(run, step, self._attempt, content, self._about, keep)

    def _evaluate(self, learner: Learner) -> dict[str, float]:
        with self._meter.paused():
            return watch_knn(learner.f_q, self._job.sets, self._recipe, self._ranks)

    def _completed(self, step: int) -> bool:
        """After each step. True if a checkpoint is to be written though none is due."""
        self._wire.step = step
        self._wire.refuse_superseded()
        if self._profile:
            with self._meter.paused():
                self._profile.completed(step)
        if step == self._first_step + 1:
            self._began = time.monotonic()
        if step == self._first_step + 2:  # the first one waited for images: it says nothing of a step
            seconds = self._ranks.gather_objects(time.monotonic() - self._began)[0]
            self._patience_seconds = patience_seconds(self._recipe, seconds)
            self._ranks.expect_answers_within(self._patience_seconds)
        self._advice = self._lookout.look(step)
        if self._advice.saved:
            self._place.point(self._advice.saved, self._ranks.is_first)
        if self._advice.save and self._ranks.is_first:
            self._wire.tell(kind="saving", step=step, why=self._advice.save)
        return bool(self._advice.save)

    def _rows_of_slots(self, queue: Queue) -> torch.Tensor:
        rows = rows_of_slots(queue.steps.cpu().numpy(), queue.position, self._plan, self._order, first_step=self._began_at)
        return torch.from_numpy(rows).to(queue.keys.device)

    def _notice(self) -> Notice | None:
        """On rank 0: the ranks whose machines are about to be taken away."""
        leaving = self._wire.orders.get("leaving", {})
        ranks = tuple(rank for rank, node in enumerate(self._nodes) if node.id in leaving)
        deadlines = [leaving[self._nodes[rank].id] for rank in ranks]
        return Notice(ranks, min((each for each in deadlines if each), default=None)) if ranks else None

    def _halt(self, until: float) -> None:
        """Begin no step before the machine is gone: it would have to be computed again. Ends if it does not go."""
        while time.time() < until + HALT_SECONDS:
            time.sleep(0.2)


def patience_seconds(recipe: Recipe, step_seconds: float) -> float:
    """How long ranks wait for a silent one, after the first steps."""
    return max(recipe.run.hang_timeout_seconds, STEPS_OF_PATIENCE * step_seconds)


def about(recipe: Recipe, manifest: Manifest, plan: Plan) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    return {
        "recipe_fingerprint": recipe.fingerprint(),
        "data_fingerprint": manifest.fingerprint,
        "order_version": order.VERSION,
        "recipe": recipe.toml(),
        "plan": plan.facts(),
        "code": code_version(),
    }


def restore(
    learner: Learner, folder: RunFolder, about: dict[str, Any], ranks: Ranks
) -> tuple[checkpoint.Saved | None, list[str]]:
    """Load the newest checkpoint that is whole, the same one on all ranks. Collective.

    Rank 0 chooses; returns its choice, and what it says of damaged ones that it skipped. Raises UserError on all ranks if
    one cannot load it.
    """
    chosen, skipped, failure = None, [], None
    if ranks.is_first:
        try:
            chosen = checkpoint.load_newest(folder.store, skipped.append, lambda saved: _accept(saved, folder, about))
        except UserError as error:
            failure = error
    _raise_on_all(failure, ranks)
    saved, skipped = ranks.gather_objects((chosen and chosen[0], skipped))[0]
    if saved is not None:
        try:
            learner.load_state_dict(chosen[1] if chosen else checkpoint.load(folder.store, saved)[0])
        except UserError as error:  # the storage of this node, or it was pruned since: another start may do better
            failure = error if ranks.is_first else StorageFailing(f"worker {ranks.rank} cannot load what worker 0 could: {error}")
    _raise_on_all(failure, ranks)
    start = torch.cat([learner.queue.fingerprint(), learner.queue.fingerprint().new_tensor([learner.step])])
    if not ranks.same_on_all(start):
        raise RuntimeError(f"the ranks differ after loading step {learner.step}; this is a fault in moco_ray, or in memory")
    return saved, skipped


def began_at(folder: RunFolder, step: int, ranks: Ranks) -> int:
    """The step that the run began at: 0, unless it carries one of the released code on, whose keys are of rows that we do not know. Collective."""
    began, failure = step, None
    if ranks.is_first:
        try:
            began = min((one.from_step for one in attempts.all_of(folder.store)), default=step)
        except UserError as error:
            failure = error
    _raise_on_all(failure, ranks)
    return ranks.gather_objects(began)[0]


def refuse_different_queues(learner: Learner, ranks: Ranks) -> None:
    """Raise RuntimeError on all ranks if the dictionary is not the same everywhere. Collective."""
    if not ranks.same_on_all(learner.queue.fingerprint()):
        raise RuntimeError(
            f"the queue differs between ranks at step {learner.step}; this is a fault in moco_ray, or in memory"
        )


def _shared(run: str, place: Place) -> RunFolder:
    """The run folder as this node sees it. Raises UserError if it does not."""
    try:
        return RunFolder.existing(run)
    except StorageFailing:
        raise
    except UserError as error:
        raise UserError(
            f"node {place.node.name} does not see the run at {run}; --storage (runs, where it is not given) must be a URI, or a "
            "folder that all nodes share"
        ) from error


def _accept(saved: checkpoint.Saved, folder: RunFolder, about: dict[str, Any]) -> None:
    place = folder.store.place(saved.name)
    checkpoint.refuse_other(place, saved.about, about["recipe_fingerprint"], about["data_fingerprint"])


def _raise_on_all(failure: UserError | None, ranks: Ranks) -> None:
    """Raise the first failure that a rank has, on every rank, so that none waits for the others. Collective."""
    found = next((each for each in ranks.gather_objects(failure) if each is not None), None)
    if found is not None:
        raise found
