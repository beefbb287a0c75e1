"""A map of features: the two directions in which they differ most, with each image at its place. Not responsible for features, nor for files.
"""

import io
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from torch import Tensor

SIDE_INCHES = 10.0
SHOWN = 400  # thumbnails: more hide each other
THUMB_SHARE = 0.035  # of the map's side


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
    figure = Figure(figsize=(SIDE_INCHES, SIDE_INCHES), dpi=120, layout="constrained")
    axes = figure.subplots()
    first, second = (100 * share for share in projection.explained)
    axes.set_title(f"{about}; {first + second:.0f} % of the variance is in this plane", fontsize=10)
    axes.set_xlabel(f"first principal component, {first:.0f} %", fontsize=8)
    axes.set_ylabel(f"second, {second:.0f} %", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.scatter(places[:, 0], places[:, 1], s=4, color="#b0b0b0", zorder=1)
    zoom = THUMB_SHARE * SIDE_INCHES * 72 / thumbs.shape[1]
    for number in np.linspace(0, len(places) - 1, min(SHOWN, len(places))).round().astype(int):  # rows may be sorted by class
        image = OffsetImage(thumbs[number], zoom=zoom, interpolation="antialiased")
        box = AnnotationBbox(image, places[number], pad=0.08, bboxprops={"linewidth": 0.3}, zorder=2)
        box.set_in_layout(False)  # the layout would ask each for its size: many seconds
        axes.add_artist(box)
    axes.margins(0.06)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
