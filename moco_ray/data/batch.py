"""What a data pipeline hands to the training loop. Not here: how it comes about."""

from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """One rank's rows of one step, in order.

    Row j of group g (own groups in rising order, n rows each) has position
    `step_in_epoch * B + g * n + j`, which is the same for every world size.
    """

    epoch: int
    crops: torch.Tensor  # N,2,H,W,3 uint8: the query's view and the key's, before the colour stage
    positions: torch.Tensor  # N int64: position in the epoch
    rows: torch.Tensor  # N int64: number of the row in the manifest (after replacement, if it was bad)
    bad: tuple["BadRow", ...] = ()  # rows of this batch that had to be replaced
    content: torch.Tensor | None = None  # N int64: hash of the encoded bytes, 0 for rows that are not of the sample (segment.py)


class BadRow(NamedTuple):
    """A row that could not be decoded, and was replaced."""

    position: int
    row: int  # number of the bad row in the manifest
    kind: str  # for example "truncated", "not an image", "too large"
    source: str  # file and row in it
    message: str
