"""Runs a trial under Ray Train: the driver's side.

Responsible for starting the workers as pre-training does (launch.py), once, and for what they tell. Not responsible for what a rank does
(doctor_worker.py).
"""

import os
import tempfile

import ray
import ray.train

from moco_ray.board import start_board
from moco_ray.data.shards import Manifest
from moco_ray.doctor_worker import PATIENCE_SECONDS, TrialJob, doctor_worker
from moco_ray.errors import UserError
from moco_ray.launch import QUICK, Trainer
from moco_ray.plan import Plan
from moco_ray.process_group import ProcessGroup
from moco_ray.restarts import one_line, user_error
from moco_ray.session import Room
from moco_ray.trial import Trial, trial_plan

NO_MEMORY = ("out of memory", "can't allocate memory")  # in what torch says, of a GPU and of a CPU
START_SECONDS, STARTS = "60", 2  # for the group of workers to come about


def carry_trial(manifest: Manifest, plan: Plan, workers: int, room: Room, debug: bool = False) -> Trial:
    """Two steps of `plan` on so many workers, inside a Ray session. Raises UserError with what went wrong, in one line."""
    for name, value in (QUICK | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": START_SECONDS}).items():
        os.environ.setdefault(name, value)
    board = start_board(1)
    with tempfile.TemporaryDirectory(prefix="moco-ray-train-", ignore_cleanup_errors=True) as notes:
        trainer = Trainer(
            doctor_worker,
            train_loop_config={"job": TrialJob(manifest, trial_plan(plan), board), "room": room},
            scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=room.on_gpus, resources_per_worker=room.claim, label_selector=room.selector),
            torch_config=ProcessGroup(timeout_s=int(PATIENCE_SECONDS)),
            run_config=ray.train.RunConfig(
                name="notes",
                storage_path=notes,
                failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=STARTS),
                logging_config=ray.train.LoggingConfig(log_level="INFO" if debug else "CRITICAL"),
                worker_runtime_env={"env_vars": {"RAY_CHDIR_TO_TRIAL_DIR": "0"}},
            ),
        )
        try:
            trainer.fit()
        except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
            if debug:
                raise
            raise user_error(error) or UserError(cause_of(error)) from error
        except SystemExit as exit_:  # Ray Train's answer to Ctrl-C
            raise KeyboardInterrupt from exit_
    found = [message["trial"] for message in ray.get(board.take.remote(0)) if "trial" in message]
    if not found:
        raise UserError("the workers ended without a word; with --debug the whole story is shown")
    return found[0]


def cause_of(error: Exception) -> str:
    """In one line, by the lowest rank that failed, and the cure where it is known."""
    failures = getattr(error, "worker_failures", {})
    first = failures[min(failures)] if failures else error
    text = one_line(first)
    if "OutOfMemory" in repr(first) or any(words in text for words in NO_MEMORY):
        return f"{text}; run.groups_per_forward=1 computes the same in less memory, as do more workers or a smaller contrast.queue_keys"
    return f"{text}; with --debug the whole story is shown"
