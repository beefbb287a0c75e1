"""A linear classifier on cached features, at several learning rates at once.

Responsible for training the stack of classifiers and for choosing one. Not the published protocol (probe.py): features are of centre
crops, made once, so that 100 epochs cost minutes. Not responsible for computing features (features.py).

All start from the same weights and see the same batches, so each is what it would be if trained alone; SGD, momentum 0.9, no weight
decay, a tenth of the rate from 60 % of the epochs on and from 80 % on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moco_ray.errors import UserError
from moco_ray.evaluate.probe import new_head
from moco_ray.evaluate.scores import Scores, Tally
from moco_ray.ranks import Ranks

RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # around the published 30, three a decade or so
HELD_OUT = 0.1  # of the training rows
MOMENTUM, FACTOR, DROPS = 0.9, 0.1, (0.6, 0.8)
JUDGED_ROWS = 2048  # at a time
_TAG = 0x5EE9


@dataclass(frozen=True)
class Settings:
    """Of a sweep. `rates` rise."""

    rates: tuple[float, ...] = RATES
    epochs: int = 100
    batch_size: int = 256
    seed: int = 0

    def rate_factor(self, epoch: int) -> float:
        """Of every rate in epoch 0, 1, .."""
        return FACTOR ** sum(epoch >= max(1, round(share * self.epochs)) for share in DROPS)


class Heads(NamedTuple):
    """L classifiers in a stack, one for each learning rate."""

    weights: Tensor  # L,D,C
    biases: Tensor  # L,1,C

    def logits(self, x: Tensor) -> Tensor:
        """N,D -> L,N,C."""
        return torch.matmul(x, self.weights) + self.biases

    def right(self, x: Tensor, y: Tensor) -> Tensor:
        """Share of the rows that each names rightly: L float64."""
        hits = sum((self.logits(part).argmax(2) == own).sum(1) for part, own in zip(x.split(JUDGED_ROWS), y.split(JUDGED_ROWS), strict=True))
        return hits.double() / len(y)


@dataclass(frozen=True)
class Swept:
    """The chosen classifier's course."""

    rate: float
    held_out: dict[float, float | None]  # rate -> top-1 on the held-out training rows at the end; None: its weights are not finite
    history: list[dict[str, Any]]  # of the chosen rate, one entry an epoch
    last: Scores
    best: Scores  # of the epoch whose test top-1 is the highest, the first of equals
    best_epoch: int


def sweep(
    x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, settings: Settings, told: Callable[[int, int], None] = lambda done, total: None
) -> Swept:
    """Train on nine tenths of x N,D and y N int64, choose by the last epoch's top-1 on the tenth, judge on test_x M,D and test_y M.

    The chosen classifier has seen nine tenths of the rows. Its test scores are of the last epoch; the best epoch is told apart. An epoch
    drops the rows that fill no batch. `told`: how many epochs are done, of how many. Raises UserError if the batch is larger than the rows, or if every rate diverges.
    """
    y, test_y = y.to(x.device), test_y.to(x.device)
    classes = int(max(y.max(), test_y.max())) + 1
    held, rest = split(len(x), settings.seed)
    if settings.batch_size > len(rest):
        raise UserError(f"--batch-size {settings.batch_size} is larger than the {len(rest)} training rows (less a held-out tenth); make it smaller")
    part, part_y = x[rest], y[rest]
    trainer, course = Stack(x.shape[1], classes, settings, x.device, x.dtype), []
    best, kept = torch.full((len(settings.rates),), -1.0, dtype=torch.float64, device=x.device), None
    best_epochs = torch.zeros(len(settings.rates), dtype=torch.int64, device=x.device)
    for epoch in range(settings.epochs):
        trainer.epoch(part, part_y, epoch)
        test, held_out = trainer.heads.right(test_x, test_y), trainer.heads.right(x[held], y[held])
        better = test > best
        best, best_epochs = torch.where(better, test, best), torch.where(better, epoch, best_epochs)
        now, mask = trainer.heads, better[:, None, None]
        kept = Heads(*(torch.where(mask, new, old) for new, old in zip(now, kept, strict=True))) if kept else Heads(*(t.clone() for t in now))
        course.append((held_out.tolist(), test.tolist()))
        told(epoch + 1, settings.epochs)
    chosen, told = _choose(trainer.heads, course[-1][0], settings.rates)
    history = [
        {"epoch": n, "learning_rate": settings.rates[chosen] * settings.rate_factor(n - 1), "held_out_top1": own[chosen], "test_top1": test[chosen]}
        for n, (own, test) in enumerate(course, 1)
    ]
    last, best_scores = (_scores(heads, chosen, test_x, test_y, classes) for heads in (trainer.heads, kept))
    return Swept(settings.rates[chosen], told, history, last, best_scores, int(best_epochs[chosen]) + 1)


def split(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Row numbers of the held-out tenth, and of the others; int64, drawn from the seed."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + _TAG))
    first = max(1, int(rows * HELD_OUT))
    return order[:first], order[first:]


def batches_of_epoch(rows: int, settings: Settings, epoch: int) -> Sequence[Tensor]:
    """Row numbers of each batch, drawn from (seed, epoch); the rows mod the batch that are left are dropped."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed((settings.seed * 1_000_003 + _TAG) * 65_537 + epoch + 1))
    return order[: rows // settings.batch_size * settings.batch_size].split(settings.batch_size)


class Stack:
    """The classifiers while they are trained."""

    def __init__(self, width: int, classes: int, settings: Settings, device: torch.device, dtype: torch.dtype):
        head, number = new_head(width, classes, settings.seed).to(device, dtype), len(settings.rates)
        self.heads = Heads(head.weight.detach().T.repeat(number, 1, 1), head.bias.detach().repeat(number, 1, 1))
        self._momentum = Heads(*(torch.zeros_like(held) for held in self.heads))
        self._settings = settings
        self._rates = torch.tensor(settings.rates, device=device, dtype=dtype)[:, None, None]  # L,1,1

    def epoch(self, x: Tensor, y: Tensor, epoch: int) -> None:
        """One pass over x N,D and y N int64."""
        rates = self._rates * self._settings.rate_factor(epoch)
        for rows in batches_of_epoch(len(x), self._settings, epoch):
            rows = rows.to(x.device)
            inputs = x[rows]
            gradient = self.heads.logits(inputs).softmax(2)  # L,B,C: of the mean cross-entropy in the logits
            gradient[:, torch.arange(len(rows), device=x.device), y[rows]] -= 1.0
            gradient /= len(rows)
            for held, moved, grad in zip(self.heads, self._momentum, (inputs.T @ gradient, gradient.sum(1, keepdim=True)), strict=True):
                moved.mul_(MOMENTUM).add_(grad)
                held.sub_(rates * moved)


def _choose(heads: Heads, held_out: list[float], rates: Sequence[float]) -> tuple[int, dict[float, float | None]]:
    """The place of the best rate, the smallest of equals, and what each reached."""
    finite = (heads.weights.isfinite().all(2).all(1) & heads.biases.isfinite().all(2).all(1)).tolist()
    told = {rate: share if whole else None for rate, share, whole in zip(rates, held_out, finite, strict=True)}
    if not any(finite):
        raise UserError(f"the classifiers of all learning rates ({', '.join(f'{r:g}' for r in rates)}) diverge; the features may be broken, or give a smaller --learning-rate")
    return max((n for n, whole in enumerate(finite) if whole), key=lambda n: (held_out[n], -n)), told


def _scores(heads: Heads, place: int, x: Tensor, y: Tensor, classes: int) -> Scores:
    tally = Tally(classes, x.device)
    for part, own in zip(x.split(JUDGED_ROWS), y.split(JUDGED_ROWS), strict=True):
        tally.add(part @ heads.weights[place] + heads.biases[place], own)
    return tally.scores(Ranks(device=x.device))
