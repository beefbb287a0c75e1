"""What a classifier reached on a test set: counted batch by batch, on any number of ranks.

Responsible for counts and for the shares that follow from them. Not responsible for a picture of them (confusion.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moco_ray.errors import UserError
from moco_ray.ranks import Ranks


@dataclass(frozen=True)
class Scores:
    """Shares, 0..1."""

    top1: float
    top5: float | None  # None with up to five classes
    per_class: list[float | None]  # top-1 of the test rows of each class; None where there are none
    confusion: list[list[int]]  # [true class][predicted class], test rows


class Tally:
    """Counts of right and wrong answers, on a device."""

    def __init__(self, classes: int, device: torch.device):
        self._confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)  # [true][predicted]
        self._in_five = torch.zeros(1, dtype=torch.int64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Logits N,C and labels N int64, on the device."""
        self._confusion.index_put_((labels, logits.argmax(1)), torch.ones_like(labels), accumulate=True)
        if logits.shape[1] > 5:
            self._in_five += (logits.topk(5, 1).indices == labels[:, None]).any(1).sum()

    def scores(self, ranks: Ranks) -> Scores:
        """Of the rows that all ranks have counted, the same on each. Collective. Raises UserError if there are none."""
        counts = ranks.sum(torch.cat([self._confusion.flatten(), self._in_five])).cpu()
        if not counts.any():
            raise UserError("no image of the test set could be read")
        confusion, in_five = counts[:-1].view_as(self._confusion), int(counts[-1])
        rows, right = confusion.sum(1).tolist(), confusion.diagonal().tolist()
        per_class = [hits / total if total else None for hits, total in zip(right, rows, strict=True)]
        top5 = in_five / sum(rows) if len(rows) > 5 else None
        return Scores(sum(right) / sum(rows), top5, per_class, confusion.tolist())
