"""Nearest images of some queries, and the sheet that shows them. Not responsible for features, nor for files.
"""

import io
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

BLOCK_ROWS = 256  # queries compared at once


class Nearest(NamedTuple):
    """Of Q queries the k nearest others, the nearest first."""

    places: Tensor  # Q,k int64: indices into the features
    similarity: Tensor  # Q,k float32: cosine


def nearest_others(features: Tensor, queries: Tensor, k: int) -> Nearest:
    """features M,D; queries Q int64, indices of rows of it, none of which is its own neighbour; k < M."""
    unit = F.normalize(features.float(), dim=1)
    places, values = [], []
    for block in queries.split(BLOCK_ROWS):
        similarity = unit[block] @ unit.T
        similarity[torch.arange(len(block)), block] = -torch.inf
        top = similarity.topk(k, dim=1)
        places.append(top.indices)
        values.append(top.values)
    return Nearest(torch.cat(places), torch.cat(values))


def sheet(queries: np.ndarray, nearest: np.ndarray, similarity: np.ndarray, title: str) -> bytes:
    """PNG: a row for each query, the query first, then its nearest with their cosine similarity.

    queries Q,P,P,3 uint8, nearest Q,k,P,P,3 uint8, similarity Q,k.
    """
    rows, columns = similarity.shape
    figure = Figure(figsize=(1.15 * (columns + 1.3), 1.3 * rows + 0.5), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=10)
    grid = figure.subplots(rows, columns + 1, squeeze=False, width_ratios=[1.25, *[1.0] * columns])
    for row in range(rows):
        for column in range(columns + 1):
            axes = grid[row][column]
            axes.set_xticks([])
            axes.set_yticks([])
            axes.imshow(queries[row] if column == 0 else nearest[row, column - 1])
            if column == 0:
                axes.set_ylabel("query", fontsize=8)
                for side in axes.spines.values():
                    side.set(linewidth=2.5, color="#d1662a")
            else:
                axes.set_xlabel(f"{similarity[row, column - 1]:.2f}", fontsize=8, labelpad=1)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
