"""Runs the loop under Ray Train: with train_worker.py, process_group.py, restarts.py and the two of a probe (training on labels) the
only places that know it.

Responsible for the driver: checks before Ray starts, a local Ray or the cluster, the trainer. Not responsible for what a failure of
the workers leads to (restarts.py), for what a rank does (train_worker.py, worker.py) nor for what is written and shown (desk.py).
"""

import contextlib
import os
import tempfile
from typing import NamedTuple

import ray
import ray.train
import ray.train.torch
import torch

from moco_ray import attempts, checkpoint
from moco_ray.asking import Elastic
from moco_ray.backbone import Backbone
from moco_ray.board import start_board
from moco_ray.cluster import forget, forget_pipelines, keep_helpers_here, living
from moco_ray.data.shards import Manifest
from moco_ray.data.survey import Spread, build_manifest
from moco_ray.desk import Desk
from moco_ray.errors import UserError
from moco_ray.evaluate.features import LabelledSet, labelled_sets
from moco_ray.evaluations import Evaluations
from moco_ray.gauges import Gauges
from moco_ray.lease import Lease
from moco_ray.method.encoder import refuse_emulated_precision
from moco_ray.monitor import Journal
from moco_ray.pictures import Gallery
from moco_ray.plan import Plan, Workers
from moco_ray.process_group import ProcessGroup
from moco_ray.progress import Progress
from moco_ray.recipe import Recipe
from moco_ray.released import released_state
from moco_ray.restarts import FAILURES, Guard, one_line
from moco_ray.run_folder import RunFolder
from moco_ray.session import Outlook, Room, lazily_spread, ray_session
from moco_ray.standing import Standing
from moco_ray.stopping import same_interrupt, stoppable
from moco_ray.train_worker import train_worker
from moco_ray.warm_start import begun_from, keep
from moco_ray.words import note
from moco_ray.worker import Job, about

STARTS = 20  # of a group of workers that did not come about, before a new controller is tried
QUICK = {  # Ray Train's own defaults notice a failure after up to a minute more
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # see cluster.nodes_leaving
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",  # for machines that Ray Train believes to be there; then it looks again
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "60",  # for a process that does not answer at all
}


class Begin(NamedTuple):
    """What a new run begins from, if not from drawn weights: at most one of the two."""

    backbone: Backbone | None = None
    released: str = ""  # a whole checkpoint of the released MoCo, to be carried on


def pretrain(recipe: Recipe, folder: RunFolder, workers: Workers, begin: Begin, debug: bool = False, profile_steps: int = 0) -> None:
    """Carry a run to its end: a new one, or this very one from its newest checkpoint, if it was cut off.

    With `profile_steps` a trace of so many steps is written. Raises UserError for all that a user can cure.
    """
    recipe = begun_from(recipe.at_absolute_paths(), begin.backbone)
    with lazily_spread(workers.most, debug) as spread:
        surveyed = survey(recipe, spread)
        surveyed.plan.refuse_world(workers.most)
        folder.refuse_strange()
        with Lease.acquire(folder.store, note) as lease:
            untouched = not attempts.numbers(folder.store)
            state = released_state(begin.released, surveyed.plan) if begin.released and untouched else None
            held = folder.holds(recipe, surveyed.manifest)
            if held and _finished(folder, surveyed) and not Standing.read(folder.store).waiting:
                note(f"{folder.place} holds this run, and it is finished: nothing to do; another --name starts a new one")
                return
            if held:
                _say_where(folder)
            else:
                for warning in [*surveyed.plan.warnings(), *surveyed.manifest.warnings]:
                    note(f"warning: {warning}")
            with ray_session(workers, debug) as room:  # before the folder becomes a run: a cluster without room refuses it
                if held:
                    folder.update(recipe, surveyed.manifest)
                else:
                    if begin.backbone:
                        keep(folder, begin.backbone)
                    folder.create(recipe, surveyed.plan, surveyed.manifest)
                if state:
                    facts = about(recipe, surveyed.manifest, surveyed.plan)
                    checkpoint.save(folder.store, state["step"], 0, checkpoint.pack(state, facts), facts, recipe.run.keep_checkpoints)
                _carry(surveyed, folder, Outlook(room, workers), lease, debug, profile_steps)


def resume(folder: RunFolder, workers: Workers | None, overrides: list[str], debug: bool = False, profile_steps: int = 0) -> None:
    """Carry a run on from its newest checkpoint, with any number of workers from one to its BN groups.

    None: as many as carried it last.
    """
    workers = workers or folder.last_workers()
    started = folder.recipe()
    recipe = folder.recipe(overrides).at_absolute_paths()
    if recipe.fingerprint() != started.fingerprint():
        raise UserError(
            f"a resumed run must compute the same; this would change {'; '.join(recipe.differences(started))}. Start a new run "
            "for that (what may change: run.* but the seed, evaluation.*, data.uri, data.max_bad_rows_fraction)"
        )
    with lazily_spread(workers.most, debug) as spread:
        surveyed = survey(recipe, spread)
        surveyed.plan.refuse_world(workers.most)
        folder.refuse_other_data(surveyed.manifest, recipe.data.uri)
        if _finished(folder, surveyed) and not Standing.read(folder.store).waiting:
            raise UserError(f"{folder.place} is finished: all {surveyed.plan.total_steps} steps are done")
        with Lease.acquire(folder.store, note) as lease, ray_session(workers, debug) as room:
            folder.update(recipe, surveyed.manifest)
            _carry(surveyed, folder, Outlook(room, workers), lease, debug, profile_steps)


class Surveyed(NamedTuple):
    """A recipe's data, and what follows from them."""

    manifest: Manifest
    plan: Plan
    sets: tuple[LabelledSet, LabelledSet] | None  # bank and queries of the evaluation, if the recipe names them


def survey(recipe: Recipe, spread: Spread | None = None) -> Surveyed:
    """The data sets and what follows from them. Raises UserError before anything is started."""
    if not recipe.data.uri:
        raise UserError("no data set: give --data FOLDER, or data.uri in the recipe")
    if not os.environ.get("RAY_ADDRESS"):  # a local Ray: the workers' device is this machine's
        refuse_emulated_precision(recipe.encoder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    manifest = build_manifest(recipe.data.uri, recipe.data.image_column, spread)
    plan = Plan(recipe, manifest.rows)
    return Surveyed(manifest, plan, labelled_sets(recipe, spread=spread) if recipe.evaluation.bank_uri else None)


def _finished(folder: RunFolder, surveyed: Surveyed) -> bool:
    """Whether all steps are done. Raises UserError if the newest checkpoint is of another recipe or data set."""
    last = checkpoint.newest(folder.store)
    if last is None:
        return False
    checkpoint.refuse_other(
        folder.store.place(last.name), last.about, surveyed.plan.recipe.fingerprint(), surveyed.manifest.fingerprint
    )
    return last.step >= surveyed.plan.total_steps


def _carry(surveyed: Surveyed, folder: RunFolder, outlook: Outlook, lease: Lease, debug: bool, profile_steps: int) -> None:
    plan, run, (room, workers) = surveyed.plan, folder.store, outlook
    last = checkpoint.newest(run)
    start = last.step if last else 0
    if workers.elastic and os.environ.get("RAY_ADDRESS") and not room.on_gpus:
        note("no GPU in the cluster: the workers will use CPUs, also on GPU nodes that join later")
    if os.environ.get("RAY_ADDRESS"):
        keep_helpers_here()
    if request := folder.last_request():
        forget(request)
    driver = living().get(ray.get_runtime_context().get_node_id(), "")
    first_attempt = max(attempts.numbers(run), default=0) + 1
    board = start_board(first_attempt)
    journal = Journal(run, plan, start, lease.confirm)
    progress = Progress(plan, start)
    evaluations = Evaluations(run, plan, surveyed.sets, room.helpers, journal.evaluated)
    # A run that carries on one of the released code began at that one's step.
    gallery = Gallery(surveyed.manifest, plan, min((attempt.from_step for attempt in attempts.all_of(run)), default=start))
    gauges = Gauges(run.uri.rstrip("/").rpartition("/")[2], plan)
    try:
        with Desk(board, journal, progress, plan, lease, evaluations, outlook, gallery, gauges) as desk, stoppable(desk.stop):
            if start < plan.total_steps:
                sets = None if evaluations.beside else surveyed.sets
                _fit(Job(run.uri, str(workers), board, driver, sets, profile_steps, first_attempt), folder, workers, room, debug)
            if not _finished(folder, surveyed):
                raise UserError(f"the workers ended before the last step; `moco-ray resume {folder.place}` goes on")
            desk.finish_evaluations()
        forget_pipelines(0)
        with contextlib.suppress(UserError):  # those that were kept for their evaluation
            checkpoint.prune(run, checkpoint.newest(run), plan.recipe.run.keep_checkpoints)
        journal.draw(run.uri.rstrip("/").rpartition("/")[2])
    finally:
        evaluations.close()
        gallery.close()
        progress.close()
        journal.close()


def _fit(job: Job, folder: RunFolder, workers: Workers, room: Room, debug: bool) -> None:
    """Run the workers until they have finished. Raises what stopped them for good."""
    for name, value in QUICK.items():
        os.environ.setdefault(name, value)
    failures, reached = 0, 0
    while True:
        error = None
        # Ray Train's own bookkeeping, in which checkpoints are pointers to ours: on this node's disk, so that no storage can
        # fail its controller, and new each time, for it takes up what it finds without being asked.
        with tempfile.TemporaryDirectory(prefix="moco-ray-train-", ignore_cleanup_errors=True) as notes:
            trainer = _trainer(job, notes, workers, room, debug)
            folder.remember_request(trainer.train_run_context.run_id)
            try:
                with same_interrupt():
                    trainer.fit()
            except (ray.train.TrainingFailedError, ray.exceptions.RayActorError) as failure:  # the second: its controller died
                error = failure
            except SystemExit as exit_:  # Ray Train's answer to Ctrl-C, once its workers are gone
                raise KeyboardInterrupt from exit_
        try:
            fatal = ray.get(job.board.fatal.remote())
        except ray.exceptions.RayError as lost:
            raise UserError(
                f"the Ray cluster was lost ({one_line(lost)}); when it is back, `moco-ray resume {folder.place}` goes on from the "
                "newest checkpoint"
            ) from lost
        if fatal is not None:
            raise fatal
        if error is None:
            return
        # What is left is the controller's own: workers that could not be started, or a process group that could not be made,
        # STARTS times. Another controller may do better.
        newest = checkpoint.newest(folder.store)
        failures, reached = (failures + 1, reached) if newest is None or newest.step <= reached else (1, newest.step)
        if isinstance(error, ray.train.WorkerGroupError) or failures >= FAILURES:
            raise _cause(error, folder, debug) from error
        ray.get(job.board.post.remote({"kind": "failed", "causes": {0: f"Ray Train's controller: {one_line(error)}"}}))


class Trainer(ray.train.torch.TorchTrainer):
    """Ray Train's, less the process of 3 s of CPU time that it starts with the workers, also at a restart, for data sets: it is
    given none. If another release of Ray makes its callbacks elsewhere, nothing but that is lost.
    """

    def _create_default_callbacks(self) -> list:
        return [one for one in super()._create_default_callbacks() if type(one).__name__ != "DatasetsCallback"]


def _trainer(job: Job, notes: str, workers: Workers, room: Room, debug: bool) -> ray.train.torch.TorchTrainer:
    return Trainer(
        train_worker,
        train_loop_config={"job": job, "room": room},
        scaling_config=Elastic(
            num_workers=(workers.least, workers.most) if workers.elastic else workers.most,
            elastic_resize_monitor_interval_s=2,
            use_gpu=room.on_gpus,
            resources_per_worker=room.claim,
            placement_strategy="PACK",  # on as few nodes as hold them: ranks of one node are neighbours, and speak over its own links
            label_selector=room.selector,
        ).watch(room, job.board),
        torch_config=ProcessGroup(timeout_s=600),
        run_config=ray.train.RunConfig(
            name="notes",
            storage_path=notes,
            failure_config=ray.train.FailureConfig(max_failures=-1, controller_failure_limit=STARTS),
            callbacks=[Guard(job.board, set(living()))],
            logging_config=ray.train.LoggingConfig(log_level="INFO" if debug else "CRITICAL"),
            worker_runtime_env={"env_vars": {"RAY_CHDIR_TO_TRIAL_DIR": "0"}},
        ),
    )


def _cause(error: ray.train.TrainingFailedError, folder: RunFolder, debug: bool) -> Exception:
    """What happened in one line, or with `debug` Ray's error."""
    if debug:
        return error
    return UserError(
        f"the run stopped: {one_line(error)}. `moco-ray resume {folder.place}` goes on from the newest checkpoint; with --debug "
        "the whole story is shown"
    )


def _say_where(folder: RunFolder) -> None:
    last = checkpoint.newest(folder.store)
    reached = f"its newest checkpoint is of step {last.step}" if last else "it has no checkpoint yet"
    note(f"{folder.place} holds this run ({reached}): going on with it; another --name starts a new one")
