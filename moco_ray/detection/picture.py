"""Some test images with the true boxes and those that each detector found, side by side. Not responsible for finding them.
"""

import io
from collections.abc import Sequence

import torch
from matplotlib import font_manager
from matplotlib.figure import Figure
from torch import Tensor
from torchvision.transforms.v2.functional import resize
from torchvision.utils import draw_bounding_boxes

from moco_ray.detection.coco import Classes, Picture
from moco_ray.detection.judge import Found

SHOWN_SCORE = 0.5
SHOWN_PIXELS = 300  # of the shorter side
COLOURS = ("#f5a623", "#3fa7f0", "#e8508d", "#63c74d", "#b57be8", "#f0e040", "#45d0c8", "#ff7f50")  # of the classes in turn


def detections_picture(pictures: Sequence[Picture], found: dict[str, Sequence[Found]], classes: Classes) -> bytes:
    """PNG: a row for each picture; the truth (crowds left out), then each detector's boxes with a score of at least SHOWN_SCORE.

    found: name of a detector -> what it found in each of the pictures.
    """
    names = ["truth", *found]
    figure = Figure(figsize=(3.1 * len(names), 3.0 * len(pictures) + 0.4), dpi=100, layout="constrained")
    figure.suptitle(f"test images; boxes with a score of at least {SHOWN_SCORE}", fontsize=10)
    grid = figure.subplots(len(pictures), len(names), squeeze=False)
    for row, picture in enumerate(pictures):
        pixels = picture.pixels()
        for column, name in enumerate(names):
            axes = grid[row][column]
            axes.set_xticks([])
            axes.set_yticks([])
            axes.imshow(_drawn(pixels, *_boxes(picture, found[name][row] if column else None), classes).permute(1, 2, 0).numpy())
            if row == 0:
                axes.set_title(name, fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _boxes(picture: Picture, found: Found | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Boxes, labels and scores to draw; those of the truth have no score."""
    if found is None:
        return picture.boxes[~picture.crowd], picture.labels[~picture.crowd], None
    kept = found.scores >= SHOWN_SCORE
    return found.boxes[kept], found.labels[kept], found.scores[kept]


def _drawn(pixels: Tensor, boxes: Tensor, labels: Tensor, scores: Tensor | None, classes: Classes) -> Tensor:
    """3,H,W uint8, enlarged or made smaller so that lines and names can be read."""
    scale = SHOWN_PIXELS / min(pixels.shape[1:])
    shown = resize(pixels, [round(scale * side) for side in pixels.shape[1:]], antialias=True)
    if not len(boxes):
        return shown
    numbers = [label - 1 for label in labels.tolist()]
    names = [classes.names[number] for number in numbers]
    if scores is not None:
        names = [f"{name} {score:.2f}" for name, score in zip(names, scores.tolist(), strict=True)]
    colours = [COLOURS[number % len(COLOURS)] for number in numbers]
    places = (boxes * scale).round().to(torch.int64)
    font = font_manager.findfont("DejaVu Sans")  # matplotlib's own
    return draw_bounding_boxes(shown, places, names, colours, width=2, font=font, font_size=13, fill_labels=True)
