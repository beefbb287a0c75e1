"""A run of the released MoCo (main_moco.py) carried on: its whole checkpoint as the state of a learner of ours.

Responsible for both encoders, the queue, the optimizer's momentum and the step. Not responsible for backbones alone (foreign.py),
nor for the other direction (export.py). The file does not tell the ages of its keys: they follow from the order of the queue.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moco_ray.errors import UserError
from moco_ray.foreign import opened, read_file
from moco_ray.learner import Learner
from moco_ray.method.queue import EMPTY, Queue
from moco_ray.plan import Plan

COUNTER = "num_batches_tracked"  # older files have none, and nothing computes with it


def released_state(place: str, plan: Plan) -> dict[str, Any]:
    """`Learner.state_dict` at the beginning of the epoch that the file says, of the plan's steps an epoch.

    Raises UserError if it is no such file, has another network, queue or head than the recipe, or is past the plan's end.
    """
    held = opened(read_file(place), place)
    if not isinstance(held, Mapping) or not {"epoch", "state_dict", "optimizer"} <= held.keys() or "module.queue" not in held["state_dict"]:
        raise UserError(
            f"{place} is no whole checkpoint of the released MoCo (state_dict with module.queue, optimizer, epoch); its weights alone "
            "begin a new run: `moco-ray import` and --warm-start"
        )
    step = int(held["epoch"]) * plan.steps_per_epoch
    if not 0 < step < plan.total_steps:
        raise UserError(
            f"{place} is of epoch {held['epoch']}, step {step} of this data set; the recipe's run has {plan.total_steps} steps. Give it "
            "a longer schedule"
        )
    if not plan.recipe.optimizer.as_released:
        raise UserError(f"{place} holds the state of SGD over all parameters alike; give optimizer.name=sgd optimizer.decay_norm_and_bias=true")
    learner = Learner.new(plan.recipe)
    state, tensors = learner.state_dict(), held["state_dict"]
    _refuse_other_queue(place, tensors["module.queue"], learner.queue)
    for ours, theirs in (("query_encoder", "encoder_q"), ("key_encoder", "encoder_k")):
        state[ours] = _encoder(place, tensors, f"module.{theirs}.", state[ours])
    state |= {"optimizer": _optimizer(place, held["optimizer"], learner), "queue": _queue(tensors, plan, step), "step": step}
    learner.load_state_dict(state)  # refuses what does not fit
    return learner.state_dict()


def _encoder(place: str, tensors: Mapping[str, Tensor], prefix: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, value in own.items():
        part, _, rest = name.partition(".")
        theirs = prefix + (rest if part == "backbone" else f"fc.{rest}")
        if theirs not in tensors and COUNTER not in name:
            raise UserError(f"{place} has no {theirs}, which the recipe's encoder needs; give the recipe its encoder.backbone and encoder.head")
        held = tensors.get(theirs, value)
        if held.shape != value.shape:
            raise UserError(
                f"{theirs} in {place} is {tuple(held.shape)} and the recipe's encoder has {tuple(value.shape)}; give the recipe its "
                "encoder.backbone, encoder.head and encoder.feature_dim"
            )
        found[name] = held.to(value.dtype)
    return found


def _refuse_other_queue(place: str, theirs: Tensor, own: Queue) -> None:
    if tuple(theirs.T.shape) != tuple(own.keys.shape):
        dim, size = theirs.shape
        raise UserError(
            f"the queue in {place} holds {size} keys of {dim}, the recipe's {len(own)} of {own.keys.shape[1]}; give "
            f"contrast.queue_keys={size} encoder.feature_dim={dim}"
        )


def _queue(tensors: Mapping[str, Tensor], plan: Plan, step: int) -> dict[str, Any]:
    """The newest key lies before the pointer, the oldest at it; each step brought `plan.keys_per_step`."""
    keys, position = tensors["module.queue"].T.contiguous(), int(tensors["module.queue_ptr"])
    age = (position - 1 - torch.arange(len(keys))) % len(keys) // plan.keys_per_step  # in steps
    made = step - 1 - age
    return {
        "version": Queue.VERSION, "keys": keys, "steps": torch.where(made >= 0, made, EMPTY), "position": position,
        "filled": min(len(keys), step * plan.keys_per_step),
    }  # fmt: skip


def _optimizer(place: str, held: Mapping[str, Any], learner: Learner) -> dict[str, Any]:
    """Ours, with their momentum: parameters of encoder_q come first there, in the same order."""
    own = learner.optimizer.state_dict()
    parameters = list(learner.f_q.parameters())
    buffers = {number: held["state"].get(number, {}).get("momentum_buffer") for number in range(len(parameters))}
    wrong = [number for number, buffer in buffers.items() if buffer is not None and buffer.shape != parameters[number].shape]
    if wrong:
        raise UserError(f"the optimizer in {place} does not fit its encoder (parameter {wrong[0]}); fetch the file again")
    own["state"] = {
        number: {"momentum_buffer": buffer.to(parameters[number].dtype)} for number, buffer in buffers.items() if buffer is not None
    }
    return own
