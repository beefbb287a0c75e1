"""The comparison table: some descriptions of the same images, judged by the same neighbours and the same classifier.

Responsible for the numbers of each row and for writing them as text, Markdown and JSON. Not responsible for
computing features, nor for printing or storing anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from moco_ray.evaluate.knn import few_labels, knn_accuracy
from moco_ray.evaluate.linear import Linear, linear_accuracy

DRAWS = 5  # of the labelled rows
NEIGHBOURS = (10, 20, 100, 200)
TEMPERATURES = (0.1, 0.07)
FEW = (1, 10, 100)  # labels per class
SHOWN = (20, 200)  # of the neighbours, at the first temperature


@dataclass(frozen=True)
class Row:
    """One set of features. Accuracies are shares, 0..1."""

    name: str
    knn: dict[float, dict[int, float]]  # temperature -> k -> accuracy with every label of the bank
    few_labels: dict[int, tuple[float, float]]  # labels per class -> mean and standard deviation over DRAWS draws, 1-NN
    linear: Linear | None  # None: not asked for


@dataclass(frozen=True)
class Protocol:
    """How the rows are judged, as far as the bank has rows for it."""

    neighbours: tuple[int, ...]
    few: tuple[int, ...]
    linear: bool
    leave_one_out: bool  # the queries are the bank's own rows
    seed: int = 0

    @classmethod
    def fitting(cls, bank_labels: torch.Tensor, leave_one_out: bool, linear: bool = True) -> "Protocol":
        """All of NEIGHBOURS and FEW that the bank is large enough for; at least one neighbour."""
        rows, smallest = len(bank_labels) - leave_one_out, int(bank_labels.unique(return_counts=True)[1].min())
        neighbours = tuple(k for k in NEIGHBOURS if k <= rows) or (max(1, rows),)
        few = tuple(n for n in FEW if n + leave_one_out <= smallest)
        return cls(neighbours, few, linear and not leave_one_out, leave_one_out)


def compare(
    named_features: dict[str, tuple[torch.Tensor, torch.Tensor]],
    bank_labels: torch.Tensor,
    query_labels: torch.Tensor,
    protocol: Protocol,
    told: Callable[[int, int, str], None] = lambda done, total, now: None,
) -> list[Row]:
    """One row for each entry of `named_features`: name -> (bank M,D, query Q,D), in the order given.

    bank_labels M int64, query_labels Q int64. kNN (Wu et al. 2018); 1-NN from a few labels of each class in DRAWS seeded
    draws, the same draws for every row; a linear classifier. `told`: how many judgements are done, of how many, and the one at work. Raises UserError as `knn_accuracy`, `few_labels` and
    `linear_accuracy` do.
    """
    rows, leave, judges = [], protocol.leave_one_out, 2 + protocol.linear
    for number, (name, (bank, query)) in enumerate(named_features.items()):
        sets, done, total = (bank, bank_labels, query, query_labels), judges * number, judges * len(named_features)
        told(done, total, f"{name}, kNN")
        knn = {t: knn_accuracy(*sets, protocol.neighbours, t, leave_one_out=leave) for t in TEMPERATURES}
        told(done + 1, total, f"{name}, few labels")
        few = {n: few_labels(*sets, n, DRAWS, protocol.seed, leave_one_out=leave) for n in protocol.few}
        if protocol.linear:
            told(done + 2, total, f"{name}, linear classifier")
        rows.append(Row(name, knn, few, linear_accuracy(*sets, protocol.seed) if protocol.linear else None))
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


def as_json(rows: Sequence[Row]) -> list[dict]:
    """The rows as dictionaries for json.dumps: accuracies as shares; k, temperature and labels as text (JSON's keys)."""
    return [
        {
            "name": row.name,
            "knn": {str(t): {str(k): share for k, share in found.items()} for t, found in row.knn.items()},
            "few_labels": {str(n): {"mean": mean, "std": std, "draws": DRAWS} for n, (mean, std) in row.few_labels.items()},
            "linear": asdict(row.linear) if row.linear else None,
        }
        for row in rows
    ]


def _shown(row: Row) -> dict[int, float]:
    found = row.knn[TEMPERATURES[0]]
    return {k: found[k] for k in SHOWN if k in found} or dict(list(found.items())[-1:])


def _head(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    few = [f"{n} label{'s' * (n > 1)}/class" for n in first.few_labels]
    return ["features", *(f"kNN k={k}" for k in _shown(first)), *few, *(["linear"] if first.linear else [])]


def _cells(row: Row) -> list[str]:
    few = [f"{100 * mean:.1f} ± {100 * std:.1f}" for mean, std in row.few_labels.values()]
    linear = [f"{100 * row.linear.top1:.1f}"] if row.linear else []
    return [row.name, *(f"{100 * share:.1f}" for share in _shown(row).values()), *few, *linear]
