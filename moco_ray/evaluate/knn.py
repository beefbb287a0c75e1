"""Nearest-neighbour classification of frozen features: how good a representation is, without training a thing.

Responsible for the weighted kNN vote and for 1-NN from a few labels per class. Torch only. Not responsible
for computing features (see features.py) nor for printing the comparison (see table.py).

Source: Wu et al. 2018 (arXiv 1805.01978), section 3.4, as in the released MoCo CIFAR-10 demo's `knn_predict`:
cosine similarity s, each of the k nearest votes for its class with weight exp(s / t), k = 200, t = 0.1.
We differ from the demo in normalising the features here, and in voting with exp((s - s_max) / t): the same
classes win, and nothing overflows at a small temperature.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moco_ray.errors import UserError

BLOCK_ROWS = 512  # queries compared at once
BLOCK_VALUES = 2**26  # and never more similarities than this at once: 256 MiB in float32, whatever the bank


def knn_predict(
    bank_features: torch.Tensor,
    bank_labels: torch.Tensor,
    query_features: torch.Tensor,
    neighbours: Sequence[int],
    temperature: float = 0.1,
    classes: int | None = None,
    block_rows: int = BLOCK_ROWS,
    leave_one_out: bool = False,
) -> torch.Tensor:
    """Predicted classes for every k at once: len(neighbours),Q int64, on the features' device.

    bank_features M,D and query_features Q,D of any float dtype, normalised here along D in that dtype, but
    at least float32; bank_labels M int64 in 0..classes-1 (`classes` None: one more than the largest label).
    At most `block_rows` queries are compared at once, and fewer against a bank so large that their
    similarities would pass BLOCK_VALUES; the size of a block does not change the result.

    Ties: of classes with equal votes the smallest wins. Which of several bank rows with exactly the same
    similarity is the k-th is torch.topk's choice. With `leave_one_out` the queries are the bank's own rows, in its order, and
    none is its own neighbour. Raises UserError if k is larger than the bank, if the shapes do not fit, or if a feature is not
    finite.
    """
    classes = _check(bank_features, bank_labels, query_features, classes)
    if leave_one_out and len(query_features) != len(bank_features):
        raise UserError(f"leave_one_out: {len(query_features)} queries are not the bank's {len(bank_features)} rows")
    _check_neighbours(neighbours, len(bank_features) - leave_one_out, temperature)
    bank, query = _unit_rows(bank_features), _unit_rows(query_features)
    labels = bank_labels.to(bank.device)
    rows = max(1, min(block_rows, BLOCK_VALUES // max(len(bank), classes)))
    predicted = []
    for first in range(0, len(query), rows):
        similarity = query[first : first + rows] @ bank.T  # R,M
        if leave_one_out:
            similarity.diagonal(first).fill_(-torch.inf)
        predicted.append(_vote(similarity, labels, neighbours, temperature, classes))  # ks,R
    return torch.cat(predicted, dim=1)


def knn_accuracy(
    bank_features: torch.Tensor,
    bank_labels: torch.Tensor,
    query_features: torch.Tensor,
    query_labels: torch.Tensor,
    neighbours: Sequence[int] = (200,),
    temperature: float = 0.1,
    classes: int | None = None,
    block_rows: int = BLOCK_ROWS,
    leave_one_out: bool = False,
) -> dict[int, float]:
    """Share of queries, 0..1, whose predicted class is query_labels (Q int64), for each k. See `knn_predict`."""
    _check_query_labels(query_features, query_labels)
    predicted = knn_predict(
        bank_features, bank_labels, query_features, neighbours, temperature, classes, block_rows, leave_one_out
    )
    right = (predicted == query_labels.to(predicted.device)).double().mean(dim=1).tolist()
    return dict(zip(neighbours, right, strict=True))


def few_labels(
    bank_features: torch.Tensor,
    bank_labels: torch.Tensor,
    query_features: torch.Tensor,
    query_labels: torch.Tensor,
    labels_per_class: int = 10,
    draws: int = 5,
    seed: int = 0,
    leave_one_out: bool = False,
) -> tuple[float, float]:
    """Accuracy of 1-NN (cosine) when only a few bank rows of each class are labelled: (mean, std) over draws.

    Shapes as in `knn_accuracy`. Draw d takes `labels_per_class` rows of each class without replacement, from
    a generator made from (seed, d): the same rows for every set of features, so encoders are compared on
    equal terms. The std is that of the draws (divisor draws - 1; 0 for one draw), not of the training. A
    harder and more telling judge than kNN with all labels, where raw pixels may do well already. With `leave_one_out` (queries
    are the bank's rows) the labelled rows are not asked.
    Raises UserError if a class has too few rows.
    """
    classes = _check(bank_features, bank_labels, query_features, None)
    _check_query_labels(query_features, query_labels)
    if labels_per_class < 1 or draws < 1:
        raise UserError(f"labels_per_class {labels_per_class} and draws {draws} must be at least 1")
    accuracies = []
    for draw in range(draws):
        rows = draw_rows(bank_labels, labels_per_class, draw, seed, classes).to(bank_features.device)
        labelled = bank_labels.to(bank_features.device)[rows]
        asked = torch.ones(len(query_labels), dtype=torch.bool, device=rows.device)
        if leave_one_out:
            asked[rows] = False
        queries, wanted = query_features[asked], query_labels.to(rows.device)[asked]
        accuracy = knn_accuracy(bank_features[rows], labelled, queries, wanted, (1,), classes=classes)
        accuracies.append(accuracy[1])
    values = torch.tensor(accuracies, dtype=torch.float64)
    return values.mean().item(), values.std().item() if draws > 1 else 0.0


def draw_rows(labels: torch.Tensor, labels_per_class: int, draw: int, seed: int, classes: int) -> torch.Tensor:
    """Rows of the bank that draw `draw` labels: present classes * labels_per_class int64, class by class, on the CPU.

    labels: M int64. A label that no row carries (a gap in the numbering) is passed over. Raises UserError if
    a class has some rows, but fewer than labels_per_class.
    """
    labels = labels.cpu()
    generator = torch.Generator().manual_seed((seed * 1_000_003 + draw) % 2**63)
    rows = []
    for label in range(classes):
        own = (labels == label).nonzero().flatten()
        if 0 < len(own) < labels_per_class:
            raise UserError(
                f"class {label} has {len(own)} rows in the bank, fewer than labels_per_class {labels_per_class}; "
                "take a larger bank or fewer labels per class"
            )
        rows.append(own[torch.randperm(len(own), generator=generator)[:labels_per_class]])
    return torch.cat(rows)


def _vote(
    similarity: torch.Tensor, labels: torch.Tensor, neighbours: Sequence[int], temperature: float, classes: int
) -> torch.Tensor:
    """ks,R int64 from R,M similarities: one top-k for the largest k serves them all, for it is sorted."""
    nearest, rows = similarity.topk(max(neighbours), dim=1)  # R,k
    weights = ((nearest - nearest[:, :1]) / temperature).exp()
    voters = labels[rows]
    predicted = []
    for k in neighbours:
        votes = similarity.new_zeros(len(similarity), classes)  # R,classes
        predicted.append(votes.scatter_add_(1, voters[:, :k], weights[:, :k]).argmax(dim=1))
    return torch.stack(predicted)


def _unit_rows(features: torch.Tensor) -> torch.Tensor:
    """N,D of unit length; half precision is widened to float32 first. A row of zeros stays zero (cosine 0)."""
    wide = features if features.dtype in (torch.float32, torch.float64) else features.float()
    return F.normalize(wide, dim=1)


def _check(
    bank_features: torch.Tensor, bank_labels: torch.Tensor, query_features: torch.Tensor, classes: int | None
) -> int:
    """The number of classes. Raises UserError if the parts do not fit together."""
    shapes = [tuple(bank_features.shape), tuple(query_features.shape)]
    if not all(len(shape) == 2 and shape[0] > 0 for shape in shapes) or shapes[0][1] != shapes[1][1]:
        raise UserError(f"bank features {shapes[0]} and query features {shapes[1]} must be M,D and Q,D with one D")
    if bank_labels.shape != (len(bank_features),) or bank_labels.dtype != torch.int64:
        raise UserError(
            f"bank labels must be {len(bank_features)} int64, not {tuple(bank_labels.shape)} {bank_labels.dtype}"
        )
    for name, features in (("bank", bank_features), ("query", query_features)):
        if not features.isfinite().all():
            raise UserError(f"the {name} features hold values that are not finite; the encoder is broken")
    smallest, largest = int(bank_labels.min()), int(bank_labels.max())
    classes = largest + 1 if classes is None else classes
    if smallest < 0 or largest >= classes:
        raise UserError(f"bank labels run from {smallest} to {largest}; they must lie in 0..{classes - 1}")
    return classes


def _check_query_labels(query_features: torch.Tensor, query_labels: torch.Tensor) -> None:
    if query_labels.shape != (len(query_features),):
        raise UserError(f"query labels must be {len(query_features)} values, not {tuple(query_labels.shape)}")


def _check_neighbours(neighbours: Sequence[int], bank_rows: int, temperature: float) -> None:
    if not neighbours or min(neighbours) < 1 or temperature <= 0.0:
        raise UserError(f"neighbours {list(neighbours)} and temperature {temperature} must be above 0")
    if max(neighbours) > bank_rows:
        raise UserError(
            f"{max(neighbours)} neighbours are more than the {bank_rows} rows of the bank; "
            f"take a larger bank or at most {bank_rows} neighbours"
        )
