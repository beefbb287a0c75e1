"""A linear classifier on frozen features: multinomial logistic regression, to its minimum.

Responsible for the fit, for choosing its regularisation without looking at the test set, and for the numbers. Not the
published protocol, which trains with SGD and crops (top-1 of that is not comparable); features here are of centre crops, made
once. Not responsible for computing features (features.py).

The objective is scikit-learn's LogisticRegression(C = 1 / (N l2)): mean cross-entropy + l2 / 2 * |W|^2, intercept free. On
features standardised by the training rows' mean and standard deviation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moco_ray.errors import UserError

L2_GRID = (1e-1, 1e-2, 1e-3, 1e-4)
HELD_OUT = 0.1  # of the training rows, to choose l2
LARGEST_BYTES = 4 * 2**30  # of the features in float64
ITERATIONS = 300
_TAG = 0x11


@dataclass(frozen=True)
class Linear:
    """What a classifier reached on the test rows. Shares, 0..1."""

    top1: float
    top5: float | None  # None with up to five classes
    per_class: list[float | None]  # top-1 of the test rows of each class; None where there are none
    confusion: list[list[int]]  # [true class][predicted class], test rows
    l2: float


def linear_accuracy(
    features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor, seed: int = 0, l2_grid: Sequence[float] = L2_GRID
) -> Linear:
    """Fit on features N,D and labels N int64, judge on test_features M,D and test_labels M int64.

    l2 is the best of the grid on a tenth of the training rows (drawn from the seed), held out for that; the classifier is
    then fitted to all of them. float64 whatever comes in. Raises UserError if there is one class only, if a feature is not
    finite, and if the features do not fit into LARGEST_BYTES.
    """
    classes = _check(features, labels, test_features, test_labels)
    mean, std = features.double().mean(0), features.double().std(0, correction=0)
    x, y = _standardised(features, mean, std), labels.to(features.device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed * 1_000_003 + _TAG)).to(x.device)
    held, rest = order[: max(1, int(len(x) * HELD_OUT))], order[max(1, int(len(x) * HELD_OUT)) :]
    best, start, chosen = -1.0, None, l2_grid[0]
    if len(l2_grid) > 1:
        part, part_labels = x[rest], y[rest]
        for l2 in sorted(l2_grid, reverse=True):
            start = fit(part, part_labels, classes, l2, start)
            right = (_logits(x[held], start).argmax(1) == y[held]).double().mean().item()
            if right > best:
                best, chosen = right, l2
        del part
    weights = fit(x, y, classes, chosen, start)
    return _judged(_logits(_standardised(test_features, mean, std), weights), test_labels.to(x.device), classes, chosen)


def fit(x: Tensor, y: Tensor, classes: int, l2: float, start: Tensor | None = None) -> Tensor:
    """The minimum of the objective: D+1,C float64, the last row the intercept. x N,D float64, y N int64.

    L-BFGS with a strong Wolfe line search, up to ITERATIONS; from `start` (D+1,C) or zeros.
    """
    weights = torch.zeros(x.shape[1] + 1, classes, dtype=torch.float64, device=x.device) if start is None else start.clone()
    weights.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=ITERATIONS, tolerance_grad=1e-6, tolerance_change=1e-10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(_logits(x, weights), y) + l2 / 2 * weights[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def _logits(x: Tensor, weights: Tensor) -> Tensor:
    return torch.addmm(weights[-1], x, weights[:-1])


def _standardised(features: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """A feature that never changes is 0."""
    return (features.double() - mean) / torch.where(std > 0, std, torch.inf)


def _judged(logits: Tensor, labels: Tensor, classes: int, l2: float) -> Linear:
    predicted = logits.argmax(1)
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=labels.device)
    confusion.index_put_((labels, predicted), torch.ones_like(labels), accumulate=True)
    totals = confusion.sum(1).tolist()
    right = confusion.diagonal().tolist()
    top5 = None
    if classes > 5:
        top5 = (logits.topk(5, 1).indices == labels[:, None]).any(1).double().mean().item()
    per_class = [hits / total if total else None for hits, total in zip(right, totals, strict=True)]
    return Linear(sum(right) / len(labels), top5, per_class, confusion.tolist(), l2)


def _check(features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor) -> int:
    """The number of classes."""
    shapes = [tuple(features.shape), tuple(test_features.shape)]
    if not all(len(shape) == 2 and shape[0] > 1 for shape in shapes) or shapes[0][1] != shapes[1][1]:
        raise UserError(f"training features {shapes[0]} and test features {shapes[1]} must be N,D and M,D with one D")
    for name, own, held in (("training", features, labels), ("test", test_features, test_labels)):
        if held.shape != (len(own),) or held.dtype != torch.int64 or int(held.min()) < 0:
            raise UserError(f"{name} labels must be {len(own)} int64 from 0 on, not {tuple(held.shape)} {held.dtype}")
        if not own.isfinite().all():
            raise UserError(f"the {name} features hold values that are not finite; the encoder is broken")
    if len(labels.unique()) < 2:
        raise UserError("the training rows are all of one class: there is nothing to tell apart; give a set with several")
    if (strange := sorted(set(test_labels.unique().tolist()) - set(labels.unique().tolist()))):
        raise UserError(f"the test rows have class {strange[0]}, which no training row has; give both sets the same classes")
    if (size := features.numel() * 8) > LARGEST_BYTES:
        raise UserError(f"the linear classifier would hold {size / 2**30:.0f} GiB of features at once; give a smaller --bank, or --no-linear")
    return int(max(labels.max(), test_labels.max())) + 1
