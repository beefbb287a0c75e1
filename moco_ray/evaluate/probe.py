"""The loop of training on labels: a classifier on a frozen backbone, or the whole network.

Responsible for the network, for a step, an epoch's end, and the state between epochs. Not responsible for the numbers of a protocol
(protocols.py), for reading images and starting ranks (probe_worker.py), nor for files. No Ray.

As in pre-training, rows and draws have positions that do not mention ranks, and the gradient is the mean over all B rows: how many
workers carry it changes the order of summation alone.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco_ray.data.augment import colour_stage
from moco_ray.data.batch import Batch
from moco_ray.errors import NonFinite, UserError
from moco_ray.evaluate.protocols import Protocol
from moco_ray.evaluate.scores import Scores
from moco_ray.method.batchnorm import average_statistics, commit_statistics
from moco_ray.method.encoder import working_dtype
from moco_ray.method.schedule import learning_rate
from moco_ray.plan import Plan, groups_of_rank
from moco_ray.ranks import Ranks

HEAD_STD = 0.01
VERSION = 1
_TAG = 0x4EAD  # keeps the classifier's draws apart from others of the seed


class Network(nn.Module):
    """`head(backbone(x))`: N,3,P,P -> N,classes logits."""

    def __init__(self, backbone: nn.Module, head: nn.Linear, tuned: bool):
        """Unless `tuned`, the backbone has no gradients and is in evaluation mode, also where `train()` is called."""
        super().__init__()
        self.backbone, self.head, self.tuned = backbone.requires_grad_(tuned), head, tuned
        self.train()

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        self.backbone.train(mode and self.tuned)
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.tuned and torch.is_grad_enabled()):
            features = self.backbone(x)
        return self.head(features)


def new_head(features: int, classes: int, seed: int) -> nn.Linear:
    """The released code's classifier before its first step: weights classes,features of N(0, 0.01), biases 0. float32."""
    head = nn.Linear(features, classes)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + _TAG)
    with torch.no_grad():
        head.weight.normal_(0.0, HEAD_STD, generator=generator)
        head.bias.zero_()
    return head


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over the names and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + b"\0" + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Student:
    """The network, its optimizer, and what it has reached. `epoch` counts the completed ones."""

    network: Network
    optimizer: torch.optim.SGD
    origin: str  # fingerprint of the backbone as it came
    epoch: int = 0
    replaced: int = 0  # rows that could not be decoded, over all ranks
    history: list[dict[str, Any]] = field(default_factory=list)  # one entry an epoch
    last: dict[str, Any] | None = None  # Scores of the last epoch
    best: dict[str, Any] | None = None  # Scores of the epoch whose test top-1 is the highest, the first of equals
    best_epoch: int = 0

    @classmethod
    def new(cls, backbone: nn.Module, head: nn.Linear, protocol: Protocol, device: torch.device | str = "cpu") -> "Student":
        """Before the first step; in the recipe's precision."""
        network = Network(backbone, head, protocol.tuned).to(device, working_dtype(protocol.recipe.encoder))
        network = network.to(memory_format=torch.channels_last)
        groups = [{"params": list(network.head.parameters()), "factor": protocol.head_factor}]
        if protocol.tuned:
            groups.append({"params": list(network.backbone.parameters()), "factor": 1.0})
        settings = protocol.recipe.optimizer
        optimizer = torch.optim.SGD(groups, settings.learning_rate, settings.sgd_momentum, weight_decay=settings.weight_decay)
        return cls(network, optimizer, fingerprint(network.backbone))

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]

    def refuse_changed_backbone(self) -> None:
        """Raise RuntimeError if a value of a frozen backbone is not what it was: then the result would not be that of the backbone."""
        if not self.network.tuned and fingerprint(self.network.backbone) != self.origin:
            raise RuntimeError(
                "the frozen backbone changed while the linear classifier was trained; this is a fault in moco_ray, or in memory, "
                "and there is no result"
            )

    def finish_epoch(self, entry: dict[str, Any], scores: Scores) -> None:
        self.epoch += 1
        self.history.append({"epoch": self.epoch, **entry, "test_top1": scores.top1, "test_top5": scores.top5})
        self.last = asdict(scores)
        if self.best is None or scores.top1 > self.best["top1"]:
            self.best, self.best_epoch = self.last, self.epoch

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values. Of a frozen backbone nothing: it comes from where it came from."""
        trained = self.network if self.network.tuned else self.network.head
        told = {name: getattr(self, name) for name in _TOLD}
        return {"version": VERSION, "trained": trained.state_dict(), "optimizer": self.optimizer.state_dict(), **told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError if it is of another release."""
        if state.get("version") != VERSION:
            raise UserError(f"the state of the probe has version {state.get('version')!r}, this release reads {VERSION}; remove it to begin anew")
        (self.network if self.network.tuned else self.network.head).load_state_dict(state["trained"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in _TOLD:
            setattr(self, name, state[name])


_TOLD = ("epoch", "replaced", "history", "last", "best", "best_epoch")

Judge = Callable[[Network], Scores]  # collective; in evaluation mode without gradients


def train(
    student: Student, batches: Iterator[Batch], labels: Tensor, plan: Plan, ranks: Ranks, judge: Judge, finished: Callable[[Student], None]
) -> None:
    """From the student's epoch to the last. `batches` are this rank's, from the first step of that epoch; `labels` (R int64, CPU) are
    those of all rows of the manifest, looked up by Batch.rows: also of a row that replaces a bad one. View 0 of each row is used.

    `finished` is called on all ranks after each epoch. Collective. Raises NonFinite at the step after one whose gradient is not finite,
    and RuntimeError if a frozen backbone changed.
    """
    step = _Step(student, labels, plan, ranks)
    for number, batch in enumerate(batches, student.epoch * plan.steps_per_epoch):
        step(number, batch)
        if (number + 1) % plan.steps_per_epoch == 0:
            entry = step.end_of_epoch(number)
            student.refuse_changed_backbone()
            student.network.eval()
            with torch.no_grad():
                scores = judge(student.network)
            student.network.train()
            student.finish_epoch(entry, scores)
            finished(student)


class _Step:
    """What one rank does with a batch, and what it sums up over an epoch."""

    def __init__(self, student: Student, labels: Tensor, plan: Plan, ranks: Ranks):
        self._student, self._labels, self._plan, self._ranks = student, labels, plan, ranks
        self._wrapped = ranks.wrap(student.network)
        self._whole = torch.ones((), dtype=torch.bool, device=ranks.device)  # was the last gradient finite? The same on all ranks
        self._forget()

    def _forget(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)  # loss, right, replaced rows

    def __call__(self, number: int, batch: Batch) -> None:
        self._refuse_broken(number)
        student, plan, recipe = self._student, self._plan, self._plan.recipe
        student.set_rate(learning_rate(plan, number))
        crops = batch.crops[:, 0].to(self._ranks.device)  # N,P,P,3 uint8
        dtype = working_dtype(recipe.encoder)
        x = colour_stage(crops, batch.positions.numpy(), 0, recipe.run.seed, batch.epoch, recipe.augment, dtype)
        y = self._labels[batch.rows].to(self._ranks.device)
        logits = self._wrapped(x)
        loss = F.cross_entropy(logits, y, reduction="sum")
        student.optimizer.zero_grad()
        # DDP takes the mean over ranks, which may own different numbers of rows: so scaled it is the mean over the B rows.
        (loss * (self._ranks.world / recipe.batch.global_batch_size)).backward()
        self._whole = student.network.head.bias.grad.isfinite().all()  # a logit that is not finite shows here, on all ranks
        student.optimizer.step()
        if student.network.tuned:
            commit_statistics(student.network.backbone, self._whole)
        right = (logits.detach().argmax(1) == y).sum()
        self._sums += torch.stack([loss.detach().double(), right.double(), right.new_tensor(len(batch.bad)).double()])

    def _refuse_broken(self, number: int) -> None:
        """Of the step before: asked before this one is queued, so the device is not held up by the question for long."""
        if not bool(self._whole):
            rate = learning_rate(self._plan, max(0, number - 1))
            raise NonFinite(
                f"the gradient is not finite at step {max(0, number - 1)} of {self._plan.total_steps}, at a learning rate of {rate:g}; give a "
                "smaller --learning-rate"
            )

    def end_of_epoch(self, number: int) -> dict[str, Any]:
        """The epoch's entry. Collective."""
        self._refuse_broken(number + 1)
        student, ranks, plan = self._student, self._ranks, self._plan
        if student.network.tuned:
            own = len(groups_of_rank(plan.groups, ranks.world, ranks.rank))
            average_statistics(student.network.backbone, ranks, own / plan.groups)
        loss, right, replaced = ranks.sum(self._sums).tolist()
        self._forget()
        student.replaced += int(replaced)
        rows = plan.steps_per_epoch * plan.recipe.batch.global_batch_size
        rates = {"learning_rate": learning_rate(plan, number), "classifier_learning_rate": student.optimizer.param_groups[0]["lr"]}
        return {**rates, "loss": loss / rows, "training_top1": right / rows}
