"""Runs a training on labels under Ray Train: the driver's side.

Responsible for starting the workers as pre-training does (launch.py), for what a failure leads to, and for the line each epoch. Not
responsible for what a rank does (probe_worker.py) nor for the result (probe_run.py). Simpler than a pre-training run: no lease, no
elastic number of workers; after a failure the workers start again from the last finished epoch, FAILURES times at most.
"""

import contextlib
import os
import sys
import tempfile
import threading
import time
from typing import Any

import ray
import ray.train

from moco_ray.errors import UserError
from moco_ray.launch import QUICK, STARTS, Trainer
from moco_ray.plan import Plan
from moco_ray.probe_worker import ProbeJob, probe_worker
from moco_ray.process_group import ProcessGroup
from moco_ray.restarts import one_line
from moco_ray.session import Room
from moco_ray.stages import Stages

FAILURES = 4
PAUSE_SECONDS = 1.0


def carry_probe(job: ProbeJob, workers: int, room: Room, debug: bool = False) -> dict[str, Any]:
    """Train to the last epoch with `workers` ranks, inside a Ray session, and return the student's last state.

    On standard error one line an epoch, and how far it is. Raises UserError for what a user can cure; the same call then goes on from the last epoch.
    """
    for name, value in QUICK.items():
        os.environ.setdefault(name, value)
    with Stages(sys.stderr) as at, _Ear(job.board, job.plan, at):
        with tempfile.TemporaryDirectory(prefix="moco-ray-train-", ignore_cleanup_errors=True) as notes:
            error = None
            try:
                _trainer(job, notes, workers, room, debug).fit()
            except (ray.train.TrainingFailedError, ray.exceptions.RayActorError) as failure:
                error = failure
            except SystemExit as exit_:  # Ray Train's answer to Ctrl-C
                raise KeyboardInterrupt from exit_
    fatal = ray.get(job.board.fatal.remote())
    if fatal is not None:
        raise fatal
    state = job.kept.read()
    if error is None and state is not None and state["epoch"] == job.protocol.recipe.schedule.epochs:
        return state
    if debug and error is not None:
        raise error
    reached = state["epoch"] if state else 0
    cause = one_line(error) if error is not None else "the workers ended before the last epoch"
    raise UserError(f"the evaluation stopped after epoch {reached}: {cause}. The same command goes on from there; with --debug the whole story is shown")


def _trainer(job: ProbeJob, notes: str, workers: int, room: Room, debug: bool) -> Trainer:
    return Trainer(
        probe_worker,
        train_loop_config={"job": job, "room": room},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=room.on_gpus, resources_per_worker=room.claim, label_selector=room.selector),
        torch_config=ProcessGroup(timeout_s=1800),
        run_config=ray.train.RunConfig(
            name="notes",
            storage_path=notes,
            failure_config=ray.train.FailureConfig(max_failures=FAILURES, controller_failure_limit=STARTS),
            callbacks=[_Guard(job.board)],
            logging_config=ray.train.LoggingConfig(log_level="INFO" if debug else "CRITICAL"),
            worker_runtime_env={"env_vars": {"RAY_CHDIR_TO_TRIAL_DIR": "0"}},
        ),
    )


class _Guard(ray.train.UserCallback):
    """In Ray Train's controller: ends the run where a restart cannot help."""

    def __init__(self, board):
        self._board = board

    def after_exception(self, run_context, worker_exceptions: dict[int, Exception]) -> None:
        """Ray Train calls it with rank -> exception. Raises to end the run; returns to have the workers started again."""
        rank, error = min(worker_exceptions.items())
        ray.get(self._board.post.remote({"kind": "failed", "cause": f"worker {rank}: {one_line(error)}"}))
        if ray.get(self._board.fatal.remote()) is not None:
            raise RuntimeError("the evaluation cannot go on; the driver tells why")


class _Ear:
    """`with _Ear(board, plan, at):` says what the workers tell, and how far they are, until the block ends."""

    def __init__(self, board, plan: Plan, at: Stages):
        self._board, self._plan, self._at, self._heard = board, plan, at, 0
        self._epochs = plan.recipe.schedule.epochs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ear", daemon=True)

    def __enter__(self) -> "_Ear":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last_round = False
        while not last_round:
            last_round = self._stop.is_set()
            try:
                messages = ray.get(self._board.take.remote(self._heard), timeout=10)
                self._tell_step(max((pulse.step for pulse in ray.get(self._board.pulses.remote(), timeout=10).values()), default=0))
            except (ray.exceptions.RayError, TimeoutError):
                time.sleep(PAUSE_SECONDS)  # Ray is ending, or the machine is busy
                continue
            for message in messages:
                self._heard = message["number"]
                with contextlib.suppress(KeyError):  # no message of ours
                    self._at.say(self._line(message))

    def _tell_step(self, step: int) -> None:
        """`step`: the one at work, counted from 1; 0 before the first."""
        if not step:
            self._at("starting workers, reading the first images")
            return
        a_epoch = self._plan.steps_per_epoch
        note = f"epoch {(step - 1) // a_epoch + 1} of {self._epochs}" + (", then its test" if step % a_epoch == 0 else "")
        self._at("training", step - 1, self._plan.total_steps, "steps", note)

    def _line(self, message: dict[str, Any]) -> str:
        if message["kind"] == "failed":
            return f"the workers failed ({message['cause']}) and start again from the last finished epoch"
        if message["kind"] == "resumed":
            return f"going on after epoch {message['epoch']}"
        return epoch_line(message["entry"], self._epochs)


def epoch_line(entry: dict[str, Any], epochs: int) -> str:
    """One epoch for people."""
    top5 = "" if entry["test_top5"] is None else f", top-5 {100 * entry['test_top5']:.1f} %"
    return (
        f"epoch {entry['epoch']}/{epochs}  loss {entry['loss']:.4f}  training top-1 {100 * entry['training_top1']:.1f} %  "
        f"test top-1 {100 * entry['test_top1']:.1f} %{top5}  rate {entry['classifier_learning_rate']:g}"
    )
