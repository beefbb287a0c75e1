"""The comparison table: raw pixels, the untrained and the trained encoder, judged by the same neighbours.

Responsible for the numbers of each row and for writing them as text, Markdown and JSON. Not responsible for
computing features, nor for printing or storing anything.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from moco_ray.evaluate.knn import few_labels, knn_accuracy

DRAWS = 5  # of the labelled rows


@dataclass(frozen=True)
class Row:
    """One set of features. Accuracies are shares, 0..1."""

    name: str
    knn: dict[int, float]  # k -> accuracy with every label of the bank
    few_labels_mean: float
    few_labels_std: float  # over the draws of the labels
    labels_per_class: int
    draws: int


def compare(
    named_features: dict[str, tuple[torch.Tensor, torch.Tensor]],
    bank_labels: torch.Tensor,
    query_labels: torch.Tensor,
    neighbours: Sequence[int] = (20, 200),
    labels_per_class: int = 10,
    seed: int = 0,
) -> list[Row]:
    """One row for each entry of `named_features`: name -> (bank M,D, query Q,D), in the order given.

    bank_labels M int64, query_labels Q int64. kNN with temperature 0.1 (Wu et al. 2018), and 1-NN from
    `labels_per_class` labels of each class in DRAWS seeded draws, the same draws for every row.
    Raises UserError as `knn_accuracy` and `few_labels` do.
    """
    rows = []
    for name, (bank, query) in named_features.items():
        knn = knn_accuracy(bank, bank_labels, query, query_labels, neighbours)
        mean, std = few_labels(bank, bank_labels, query, query_labels, labels_per_class, DRAWS, seed)
        rows.append(Row(name, knn, mean, std, labels_per_class, DRAWS))
    return rows


def as_text(rows: Sequence[Row]) -> str:
    """The table for a terminal: aligned columns, accuracies in per cent, no line break at the end."""
    cells = [_head(rows), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *numbers in cells:
        aligned = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def as_markdown(rows: Sequence[Row]) -> str:
    """The table for a report, accuracies in per cent, no line break at the end."""
    head, *body = [_head(rows), *map(_cells, rows)]
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def as_json(rows: Sequence[Row]) -> dict:
    """The table as a dictionary for json.dumps: {"rows": [...]}, accuracies as shares, k as text (JSON's keys)."""
    return {"rows": [{**asdict(row), "knn": {str(k): share for k, share in row.knn.items()}} for row in rows]}


def _head(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    few = f"1-NN, {first.labels_per_class} labels/class"
    return ["features", *(f"kNN k={k}" for k in first.knn), few]


def _cells(row: Row) -> list[str]:
    few = f"{100 * row.few_labels_mean:.1f} ± {100 * row.few_labels_std:.1f}"
    return [row.name, *(f"{100 * share:.1f}" for share in row.knn.values()), few]
