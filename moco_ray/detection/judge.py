"""COCO's average precision of what a detector found, by pycocotools, and the table of two detectors beside each other.

Responsible for the measure and for the text. Not responsible for finding anything.
"""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from moco_ray.detection.coco import Classes, Picture
from moco_ray.errors import UserError


class Found(NamedTuple):
    """What a detector finds in one image."""

    boxes: Tensor  # N,4 float32: x0, y0, x1, y1 in the image's pixels
    labels: Tensor  # N int64, 1..C
    scores: Tensor  # N float32


class Precision(NamedTuple):
    """Average precision by COCO's definition, shares 0..1: over IoU 0.50 to 0.95, at 0.50, at 0.75; at most 100 boxes an image."""

    ap: float
    ap50: float
    ap75: float
    ap_of_class: dict[str, float | None]  # over IoU 0.50 to 0.95; None where the test set has no such object


class Row(NamedTuple):
    """One line of the table."""

    name: str
    precision: Precision
    loss: float  # mean of the last tenth of the steps


def pycocotools() -> Any:
    """The package. Raises UserError if it is not there."""
    try:
        import pycocotools.coco
        import pycocotools.cocoeval
    except ImportError as error:
        raise UserError("average precision is measured by a package more: pip install 'moco_ray[detection]'") from error
    return pycocotools


def average_precision(pictures: Sequence[Picture], found: Sequence[Found], classes: Classes) -> Precision:
    """Of `found`, one for each picture. Raises UserError without pycocotools, and if the pictures have no box."""
    package = pycocotools()
    truth, detections = [], []
    for number, (picture, one) in enumerate(zip(pictures, found, strict=True)):
        extra = zip(picture.areas.tolist(), picture.crowd.tolist(), strict=True)
        truth += [
            {**_entry(number, box, label), "area": area, "iscrowd": int(crowd)}
            for box, label, (area, crowd) in zip(picture.boxes.tolist(), picture.labels.tolist(), extra, strict=True)
        ]
        detections += [
            {**_entry(number, box, label), "area": (box[2] - box[0]) * (box[3] - box[1]), "iscrowd": 0, "score": score}
            for box, label, score in zip(one.boxes.tolist(), one.labels.tolist(), one.scores.tolist(), strict=True)
        ]
    if not any(not one["iscrowd"] for one in truth):
        raise UserError("the test images have no box: there is nothing to measure; give a test set with boxes")
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools tells each of its steps
        known, answered = (_indexed(package, entries, len(pictures), classes) for entries in (truth, detections))
        judged = package.cocoeval.COCOeval(known, answered, "bbox")
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    ap, ap50, ap75 = map(float, judged.stats[:3])
    by_class = judged.eval["precision"][:, :, :, 0, -1]  # IoU, recall, class: all areas, 100 boxes; -1 without an object
    means = {
        name: float(one[one > -1].mean()) if (one > -1).any() else None
        for name, one in zip(classes.names, by_class.transpose(2, 0, 1), strict=True)
    }
    return Precision(ap, ap50, ap75, means)


def _entry(image: int, box: list[float], label: int) -> dict:
    x0, y0, x1, y1 = box
    return {"image_id": image, "category_id": label, "bbox": [x0, y0, x1 - x0, y1 - y0]}


def _indexed(package: Any, entries: list[dict], images: int, classes: Classes) -> Any:
    """A pycocotools.COCO. Ids begin at 1: pycocotools takes a match with annotation 0 for none."""
    held = package.coco.COCO()
    held.dataset = {
        "images": [{"id": number} for number in range(images)],
        "annotations": [{**entry, "id": number + 1} for number, entry in enumerate(entries)],
        "categories": [{"id": number + 1} for number in range(len(classes.ids))],
    }
    held.createIndex()
    return held


HEAD = ("backbone", "AP", "AP50", "AP75", "loss")


def as_text(rows: Sequence[Row]) -> str:
    """The table for a terminal, precision in per cent, no line break at the end."""
    lines = [HEAD, *map(_cells, rows)]
    wide = max(len(line[0]) for line in lines)
    text = ["  ".join([first.ljust(wide), *(cell.rjust(6) for cell in rest)]) for first, *rest in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def as_markdown(rows: Sequence[Row]) -> str:
    """The table for a report, precision in per cent, no line break at the end."""
    rule = ["---", *("---:" for _ in HEAD[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEAD, rule, *map(_cells, rows)))


def _cells(row: Row) -> list[str]:
    return [row.name, *(f"{100 * share:.1f}" for share in row.precision[:3]), f"{row.loss:.3f}"]
