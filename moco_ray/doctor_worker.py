"""One rank of a trial, as Ray Train calls it in each of its processes.

Responsible for the rank's images and for telling the driver. Not responsible for the steps (trial.py) nor for starting workers
(launch_doctor.py).
"""

from dataclasses import dataclass
from typing import Any

import ray
import ray.train.torch
import torch

from moco_ray.data.shards import Manifest
from moco_ray.data.stream import batches
from moco_ray.learner import Learner
from moco_ray.method.encoder import refuse_emulated_precision, use_float32_of
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.session import Room
from moco_ray.trial import trial

PATIENCE_SECONDS = 600.0  # that ranks wait for each other


@dataclass(frozen=True)
class TrialJob:
    """What every rank is told by the driver."""

    manifest: Manifest
    plan: Plan  # of the trial
    board: Any  # see board.py


def doctor_worker(config: dict[str, Any]) -> None:
    """One rank. Raises what stops it."""
    job: TrialJob = config["job"]
    room: Room = config["room"]
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(room.worker_cpus)
    ranks = Ranks.current(device)
    ranks.expect_answers_within(PATIENCE_SECONDS)
    plan = job.plan
    refuse_emulated_precision(plan.recipe.encoder, device)
    use_float32_of(plan.recipe.encoder)
    # By data tasks from the first step on, for it is also seen whether they run.
    rows = batches(job.manifest, plan.recipe, plan, ranks.world, ranks.rank, 0, room.data_place_beside(ranks), head_start=False)
    if device.type != "cpu":
        rows = (batch._replace(crops=batch.crops.to(device)) for batch in rows)
    found = trial(Learner.new(plan.recipe, device), rows, plan, ranks)
    if ranks.is_first:
        ray.get(job.board.post.remote({"trial": found}))
