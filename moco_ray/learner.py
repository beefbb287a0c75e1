"""All that learns and must survive an interruption: both encoders, the optimizer, the queue, the step.

A plain record with a state, not a module: the query encoder alone is given to DDP. Not here: the loop
(train.py) and files (checkpoint.py).
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moco_ray.errors import UserError
from moco_ray.method.batchnorm import average_statistics
from moco_ray.method.encoder import build_encoder, working_dtype
from moco_ray.method.momentum import key_encoder_of
from moco_ray.method.optimizers import build_optimizer
from moco_ray.method.queue import Queue
from moco_ray.plan import groups_of_rank
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe


@dataclass
class Learner:
    """`step` counts the completed steps. `bad_rows` counts replaced rows of `bad_epoch`, over all ranks."""

    f_q: nn.Module
    f_k: nn.Module
    optimizer: torch.optim.Optimizer
    queue: Queue
    step: int = 0
    bad_epoch: int = 0
    bad_rows: int = 0

    VERSION = 1

    @classmethod
    def new(cls, recipe: Recipe, device: torch.device | str = "cpu") -> "Learner":
        """The learner before step 0; the same on every rank, for all of it is drawn from the seed."""
        layout = torch.channels_last if recipe.run.memory_format == "channels_last" else torch.contiguous_format
        seed = recipe.run.seed
        f_q = build_encoder(recipe.encoder, recipe.batch.bn_group_size, seed).to(device, memory_format=layout)
        size, dim = recipe.contrast.queue_keys, recipe.encoder.feature_dim
        queue = Queue(size, dim, seed + 1, device, working_dtype(recipe.encoder))
        learner = cls(f_q, key_encoder_of(f_q), build_optimizer(f_q, recipe.optimizer), queue)
        if recipe.encoder.compile:
            for encoder in (learner.f_q, learner.f_k):
                encoder.compile(dynamic=False)  # in place: the names of the state stay; whole batches only, so shapes are few
        return learner

    def average_statistics(self, ranks: Ranks, groups: int) -> None:
        """Make the BatchNorm running statistics of both encoders those of the whole run, on every rank."""
        share = len(groups_of_rank(groups, ranks.world, ranks.rank)) / groups
        average_statistics(self.f_q, ranks, share)
        average_statistics(self.f_k, ranks, share)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that `torch.load(weights_only=True)` reads it."""
        return {
            "version": self.VERSION,
            "step": self.step,
            "query_encoder": self.f_q.state_dict(),
            "key_encoder": self.f_k.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "queue": self.queue.state_dict(),
            "bad_epoch": self.bad_epoch,
            "bad_rows": self.bad_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state. Raises UserError, unchanged, if it is of another version or another encoder."""
        if state.get("version") != self.VERSION:
            raise UserError(
                f"the checkpoint has state version {state.get('version')!r} and this release reads {self.VERSION}; "
                "use the release that wrote it"
            )
        for name, module in (("query_encoder", self.f_q), ("key_encoder", self.f_k)):
            _refuse_other_model(state[name], module)
        if state["queue"]["keys"].shape != self.queue.keys.shape:
            raise UserError(
                f"the checkpoint's queue is {tuple(state['queue']['keys'].shape)} and the recipe's "
                f"{tuple(self.queue.keys.shape)}; use the recipe that the checkpoint was made with"
            )
        self.f_q.load_state_dict(state["query_encoder"])
        self.f_k.load_state_dict(state["key_encoder"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would take the tensors themselves
        for parameter, held in self.optimizer.state.items():
            # In the parameter's own memory layout: the fused step pairs elements by their place in memory, so a
            # run resumed with another memory_format would mix them up.
            for name, value in held.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    held[name] = torch.empty_like(parameter).copy_(value)
        self.queue.load_state_dict(state["queue"])
        self.step = int(state["step"])
        self.bad_epoch, self.bad_rows = int(state["bad_epoch"]), int(state["bad_rows"])


def _refuse_other_model(saved: dict[str, torch.Tensor], module: nn.Module) -> None:
    own = module.state_dict()
    for name in [*own, *saved]:
        theirs, ours = saved.get(name), own.get(name)
        if theirs is None or ours is None or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            raise UserError(
                f"the checkpoint is of another encoder: {name} is {_describe(theirs)} there and {_describe(ours)} in "
                "the recipe; use the recipe that the checkpoint was made with (recipe.toml in its run folder)"
            )


def _describe(value: torch.Tensor | None) -> str:
    return "absent" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
