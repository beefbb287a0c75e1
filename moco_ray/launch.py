"""Runs the loop under Ray Train: the only place that knows ray.train.

Responsible for the driver (checks before Ray starts, a local Ray or the cluster, the trainer, the progress bar) and for
the worker's function that puts ranks, data, learner and outputs together. Not responsible for what a step does.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.train
import ray.train.torch
import torch

from moco_ray import checkpoint
from moco_ray.data import order
from moco_ray.data.shards import Manifest
from moco_ray.data.stream import batches
from moco_ray.data.survey import Spread, build_manifest
from moco_ray.errors import UserError
from moco_ray.evaluate.curves import draw_curves
from moco_ray.evaluate.features import LabelledSet, labelled_sets, watch_knn
from moco_ray.learner import Learner
from moco_ray.method.encoder import refuse_emulated_precision
from moco_ray.monitor import Monitor
from moco_ray.plan import Plan
from moco_ray.progress import Progress
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.run_folder import RunFolder, code_version, told_as_user_error
from moco_ray.session import lazily_spread, ray_session
from moco_ray.train import Outputs, train

POLL_SECONDS = 0.5


@ray.remote(num_cpus=0)
class Board:
    """Carries entries from rank 0 to the driver's progress bar, wherever the two run."""

    def __init__(self):
        self._entries: list[dict[str, Any]] = []

    def tell(self, entry: dict[str, Any]) -> None:
        self._entries.append(entry)

    def take(self) -> list[dict[str, Any]]:
        entries, self._entries = self._entries, []
        return entries


def pretrain(recipe: Recipe, folder: RunFolder, workers: int, debug: bool = False) -> RunFolder:
    """Start a new run and carry it to its end. Raises UserError for all that a user can cure."""
    recipe = recipe.at_absolute_paths()
    with lazily_spread(workers, debug) as spread:
        surveyed = survey(recipe, spread)
        surveyed.plan.refuse_world(workers)
        folder.refuse_if_taken(recipe)
        for warning in [*surveyed.plan.warnings(), *surveyed.manifest.warnings]:
            print(f"warning: {warning}", file=sys.stderr)
        folder.create(recipe, surveyed.plan, surveyed.manifest)
        _carry(surveyed, folder, workers, debug)
    return folder


def resume(folder: RunFolder, workers: int | None, overrides: list[str], debug: bool = False) -> RunFolder:
    """Carry a run on from its newest checkpoint, with any number of workers from one to its BN groups.

    None: as many as carried it last.
    """
    workers = folder.last_workers() if workers is None else workers
    started = Recipe.read(folder.recipe)
    recipe = Recipe.read(folder.recipe, overrides).at_absolute_paths()
    if recipe.fingerprint() != started.fingerprint():
        raise UserError(
            f"a resumed run must compute the same; this would change {'; '.join(recipe.differences(started))}. Start a new run "
            "for that (what may change: run.* but the seed, evaluation.*, data.uri, data.max_bad_rows_fraction)"
        )
    held = Manifest.load(folder.manifest)
    last = checkpoint.newest(folder.checkpoints)
    with lazily_spread(workers, debug) as spread:
        surveyed = survey(recipe, spread)
        manifest, plan = surveyed.manifest, surveyed.plan
        plan.refuse_world(workers)
        if held.fingerprint != manifest.fingerprint:
            raise UserError(
                f"the data at {recipe.data.uri} is not what the run began with ({manifest.rows} rows, {held.rows} then; "
                f"fingerprint {manifest.fingerprint}, {held.fingerprint} then); bring it back, or start a new run"
            )
        if last and checkpoint.step_of(last) >= plan.total_steps:
            raise UserError(f"{folder.path} is finished: all {plan.total_steps} steps are done")
        if last:
            checkpoint.refuse_other(last, checkpoint.about_of(last), recipe.fingerprint(), manifest.fingerprint)
        folder.update(recipe, manifest)
        _carry(surveyed, folder, workers, debug)
    return folder


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


def _carry(surveyed: Surveyed, folder: RunFolder, workers: int, debug: bool) -> None:
    plan = surveyed.plan
    with folder.locked(), ray_session(workers, debug) as room:
        last = checkpoint.newest(folder.checkpoints)
        start = checkpoint.step_of(last) if last else 0
        folder.add_attempt(workers, start)
        board, progress = Board.remote(), Progress(plan, start)
        stop = threading.Event()
        watcher = threading.Thread(target=_watch, args=(board, progress, stop), daemon=True)
        watcher.start()
        trainer = ray.train.torch.TorchTrainer(
            _worker,
            train_loop_config={"run": str(folder.path), "board": board, "room": room, "sets": surveyed.sets},
            scaling_config=ray.train.ScalingConfig(
                num_workers=workers,
                use_gpu=room.gpus > 0,
                resources_per_worker={"CPU": room.worker_cpus, **({"GPU": 1} if room.gpus else {})},
            ),
            torch_config=ray.train.torch.TorchConfig(timeout_s=600),
            run_config=ray.train.RunConfig(
                # Ray's own bookkeeping; a name used once, for Ray takes up an old one without being asked.
                name=f"attempt-{time.strftime('%Y%m%dT%H%M%S')}",
                storage_path=str(folder.path / "ray"),
                logging_config=ray.train.LoggingConfig(log_level="INFO" if debug else "CRITICAL"),
                worker_runtime_env={"env_vars": {"RAY_CHDIR_TO_TRIAL_DIR": "0"}},
            ),
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise _cause(error, folder, debug) from error
        except SystemExit as error:  # Ray Train's answer to Ctrl-C, once its workers are gone
            raise KeyboardInterrupt from error
        finally:
            stop.set()
            watcher.join()
            progress.close()
    draw_curves(folder.metrics, folder.curves, folder.path.name)


def _worker(config: dict[str, Any]) -> None:
    """One rank of a run: what Ray Train calls in each of its processes."""
    folder = RunFolder(Path(config["run"]))
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(config["room"].worker_cpus)
    ranks = Ranks.current(device)
    recipe, manifest = Recipe.read(folder.recipe), Manifest.load(folder.manifest)
    refuse_emulated_precision(recipe.encoder, device)
    plan, learner = Plan(recipe, manifest.rows), Learner.new(recipe, device)
    about = {
        "recipe_fingerprint": recipe.fingerprint(),
        "data_fingerprint": manifest.fingerprint,
        "order_version": order.VERSION,
        "recipe": recipe.toml(),
        "plan": plan.facts(),
        "code": code_version(),
    }
    restore(learner, folder, about, ranks)

    def tell(entry: dict[str, Any]) -> None:
        config["board"].tell.remote(entry)

    with told_as_user_error(folder.path):
        monitor = Monitor(folder.path, plan, ranks, learner.step, tell)

    def record(entry: dict[str, Any], bad: list) -> None:
        with told_as_user_error(folder.path):
            monitor.record(entry, bad)

    def save(learner: Learner) -> None:
        with monitor.paused(), told_as_user_error(folder.path):
            monitor.flush()
            save_on_first(learner, folder, about, recipe, ranks)

    def evaluate(learner: Learner) -> dict[str, float]:
        with monitor.paused():
            return watch_knn(learner.f_q, config["sets"], recipe, ranks)

    rows = batches(manifest, recipe, plan, ranks.world, ranks.rank, learner.step, config["room"].data_cpus)
    if device.type != "cpu":
        rows = (batch._replace(crops=batch.crops.to(device)) for batch in rows)
    try:
        train(learner, monitor.timed(rows), plan, ranks, Outputs(record, save, evaluate))
    finally:
        with contextlib.suppress(OSError):  # what stopped the run is the error to tell
            monitor.close()


def restore(learner: Learner, folder: RunFolder, about: dict[str, Any], ranks: Ranks) -> None:
    """Load the newest checkpoint, if there is one, and see that all ranks stand at the same point. Collective."""
    last = checkpoint.newest(folder.checkpoints)
    if last is not None:
        state, held = checkpoint.load(last)
        checkpoint.refuse_other(last, held, about["recipe_fingerprint"], about["data_fingerprint"])
        learner.load_state_dict(state)
    start = torch.cat([learner.queue.fingerprint(), learner.queue.fingerprint().new_tensor([learner.step])])
    if not ranks.same_on_all(start):
        raise UserError(
            f"the workers do not see the same checkpoints in {folder.checkpoints}; the storage must be one that all nodes share"
        )


def save_on_first(learner: Learner, folder: RunFolder, about: dict[str, Any], recipe: Recipe, ranks: Ranks) -> None:
    """Rank 0 writes the checkpoint; a failure is raised on every rank, so that none waits for the others. Collective."""
    if not ranks.same_on_all(learner.queue.fingerprint()):
        raise RuntimeError(
            f"the queue differs between ranks at step {learner.step}; this is a fault in moco_ray, or in memory"
        )
    failure = None
    if ranks.is_first:
        try:
            checkpoint.save(folder.checkpoints, learner.step, learner.state_dict(), about, recipe.run.keep_checkpoints)
        except UserError as error:
            failure = error
    failure = ranks.gather_objects(failure)[0]
    if failure is not None:
        raise failure


def _watch(board, progress: Progress, stop: threading.Event) -> None:
    while True:
        last_round = stop.is_set()
        try:
            for entry in ray.get(board.take.remote(), timeout=10):
                progress.show(entry)
        except (ray.exceptions.RayError, TimeoutError):
            pass  # the bar is a comfort; the run's own errors arrive through the trainer
        if last_round:
            return
        stop.wait(POLL_SECONDS)


def _cause(error: ray.train.TrainingFailedError, folder: RunFolder, debug: bool) -> Exception:
    """The user's error inside what Ray raises; otherwise what happened in one line, or with `debug` Ray's error."""
    failures = getattr(error, "worker_failures", {}) or {}
    for failure in failures.values():
        seen: BaseException | None = failure
        while seen is not None:
            if isinstance(seen, UserError):
                return type(seen)(str(seen.args[0]).strip()) if seen.args else seen
            seen = getattr(seen, "cause", None) or seen.__cause__
    if debug:
        return error
    last = (str(next(iter(failures.values()), error)).strip() or repr(error)).splitlines()[-1]
    return UserError(
        f"the run stopped: {last}. `moco-ray resume {folder.path}` goes on from the newest checkpoint; with --debug the "
        "whole story is shown"
    )
