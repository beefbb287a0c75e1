"""A map of features: the two directions in which they differ most, with each image at its place. Not responsible for features, nor for files.
"""

import io
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

CANVAS_PIXELS = 1100
THUMB_PIXELS = 36
SHOWN = 400  # thumbnails: more hide each other
MARGIN = 0.04  # of the map, on each side


class Projection(NamedTuple):
    """Features in two dimensions."""

    places: Tensor  # N,2 float32: along the first and the second principal component
    explained: tuple[float, float]  # the share of the whole variance that each holds, 0..1


def project(features: Tensor) -> Projection:
    """The first two principal components of features N,D normalised to unit length (N, D at least 2), by a full SVD: no draw.

    The sign of a component, which an SVD leaves open, is such that its largest loading is positive.
    """
    unit = F.normalize(features.double(), dim=1)
    centred = unit - unit.mean(0)
    _, spread, directions = torch.linalg.svd(centred, full_matrices=False)
    two = directions[:2]
    largest = two.gather(1, two.abs().argmax(1, keepdim=True))
    two = two * torch.where(largest < 0, -1.0, 1.0)
    shares = spread**2 / (spread**2).sum().clamp_min(1e-300)
    return Projection((centred @ two.T).float(), (float(shares[0]), float(shares[1])))


def map_picture(projection: Projection, thumbs: np.ndarray, about: str) -> bytes:
    """PNG of thumbs N,P,P,3 uint8 at their places; of more than SHOWN, so many at even steps, the others as dots. `about` begins the title."""
    places = projection.places.numpy()
    low, high = places.min(0), places.max(0)
    edge = MARGIN * np.maximum(high - low, 1e-6)
    low, high = low - edge, high + edge
    spots = ((places - low) / (high - low) * [1, -1] + [0, 1]) * (CANVAS_PIXELS - 1)  # N,2: column and row of the canvas
    figure = Figure(figsize=(10, 10), dpi=120, layout="constrained")
    axes = figure.subplots()
    first, second = (100 * share for share in projection.explained)
    axes.set_title(f"{about}; {first + second:.0f} % of the variance is in this plane", fontsize=10)
    axes.set_xlabel(f"first principal component, {first:.0f} %", fontsize=8)
    axes.set_ylabel(f"second, {second:.0f} %", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.imshow(_canvas(spots.round().astype(int), thumbs), extent=(low[0], high[0], low[1], high[1]), aspect="auto")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _canvas(spots: np.ndarray, thumbs: np.ndarray) -> Image.Image:
    """The map's inside. Painted, as hundreds of artists take matplotlib the better part of a minute."""
    canvas = Image.new("RGB", (CANVAS_PIXELS, CANVAS_PIXELS), "white")
    for column, row in spots:
        canvas.paste((150, 150, 150), (column - 1, row - 1, column + 2, row + 2))
    for number in np.linspace(0, len(spots) - 1, min(SHOWN, len(spots))).round().astype(int):  # rows may be sorted by class
        thumb = Image.fromarray(thumbs[number]).resize((THUMB_PIXELS, THUMB_PIXELS), Image.Resampling.BOX)
        canvas.paste(thumb, tuple(int(place) - THUMB_PIXELS // 2 for place in spots[number]))
    return canvas
