"""Images with boxes, as COCO's JSON describes them: read, checked and numbered for a detector.

Responsible for what a file may hold and for what is left out and counted. Local files only. Not responsible for training, nor for
the measure (judge.py).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from moco_ray.data.storage import one_line
from moco_ray.errors import UserError

_TAG = 0xD7
HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class Classes:
    """The categories of a training set: a detector's label l = 1..C is category `ids[l - 1]`; 0 is background."""

    ids: tuple[int, ...]  # ascending, with gaps as the file has them
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Picture:
    """One image and its N boxes."""

    path: Path
    width: int
    height: int
    boxes: Tensor  # N,4 float32: x0, y0, x1, y1 in pixels, inside the image
    labels: Tensor  # N int64, 1..C
    areas: Tensor  # N float32, as annotated
    crowd: Tensor  # N bool: a region of many objects, not one

    def pixels(self) -> Tensor:
        """3,H,W uint8 RGB, turned upright by EXIF as Detectron2 does. Raises UserError if it cannot be read or has another size."""
        try:
            with Image.open(self.path) as opened:
                image = ImageOps.exif_transpose(opened).convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{self.path} cannot be read as an image ({one_line(error)}); repair it, or take it out of the annotations") from error
        if image.size != (self.width, self.height):
            raise UserError(
                f"{self.path} has {image.width}x{image.height} pixels and its annotations are for {self.width}x{self.height}; "
                "the boxes would be wrong: take the images that were annotated"
            )
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@dataclass(frozen=True, eq=False)
class CocoSet:
    """A set of images and what was left out of it."""

    place: str
    pictures: tuple[Picture, ...]
    classes: Classes
    degenerate_boxes: int  # without an area inside their image, or not finite

    @property
    def boxes(self) -> int:
        """How many, without crowds."""
        return sum(int((~picture.crowd).sum()) for picture in self.pictures)

    def of(self, pictures: Sequence[Picture]) -> "CocoSet":
        """Some of its pictures."""
        return replace(self, pictures=tuple(pictures))

    def trainable(self) -> "CocoSet":
        """The pictures with a box that is no crowd, as Detectron2 trains; crowds are no targets. Raises UserError if there is none."""
        kept = [
            replace(one, boxes=one.boxes[~one.crowd], labels=one.labels[~one.crowd], areas=one.areas[~one.crowd], crowd=one.crowd[~one.crowd])
            for one in self.pictures
            if bool((~one.crowd).any())
        ]
        if not kept:
            raise UserError(f"{self.place} holds no box to learn from; give annotations with boxes")
        return self.of(kept)


def read(annotations: str, images: str, classes: Classes | None = None) -> CocoSet:
    """A COCO JSON file and the folder that its `file_name`s lie in; with `classes` those of another set, whose labels are meant.

    Raises UserError, naming the place and the entry: no such file, no JSON, no part of COCO's, an image that is missing, an
    annotation without a box, of an unknown image or of an unknown category.
    """
    content = _content(annotations)
    if classes is None:
        classes = _classes(content["categories"], annotations)
    label_of = {category: number + 1 for number, category in enumerate(classes.ids)}
    by_image: dict[Any, list[dict]] = {_of(image, "id", annotations): [] for image in content["images"]}
    if len(by_image) < len(content["images"]):
        raise UserError(f"{annotations} gives one id to several images; give each its own")
    for one in content["annotations"]:
        _check(one, by_image, label_of, annotations)
        by_image[one["image_id"]].append(one)
    folder, degenerate, pictures = Path(images), 0, []
    if not folder.is_dir():
        raise UserError(f"--images {images} is no folder on this machine; give the folder that the file_name of {annotations} lie in")
    for image in content["images"]:
        picture, lost = _picture(image, by_image[image["id"]], folder, label_of, annotations)
        pictures.append(picture)
        degenerate += lost
    return CocoSet(annotations, tuple(pictures), classes, degenerate)


def hold_out(whole: CocoSet, seed: int) -> tuple[CocoSet, CocoSet]:
    """Without a test set: a fifth of the pictures, drawn from the seed, at least one, is kept from training. Raises UserError for one picture."""
    rows = len(whole.pictures)
    if rows < 2:
        raise UserError(f"{whole.place} holds {rows} image: too few to hold some out; give --test-annotations")
    order = np.random.default_rng([_TAG, seed]).permutation(rows)
    cut = max(1, round(HELD_OUT_SHARE * rows))
    test, train = sorted(order[:cut]), sorted(order[cut:])
    return whole.of([whole.pictures[n] for n in train]), whole.of([whole.pictures[n] for n in test])


def _content(annotations: str) -> dict[str, list[dict]]:
    try:
        content = json.loads(Path(annotations).read_bytes())
    except OSError as error:
        raise UserError(f"--annotations {annotations} cannot be read ({one_line(error)}); give a COCO JSON file on this machine") from error
    except ValueError as error:
        raise UserError(f"{annotations} is no JSON ({one_line(error)}); give annotations in COCO's format") from error
    for part in ("images", "annotations", "categories"):
        held = content.get(part) if isinstance(content, dict) else None
        if not isinstance(held, list) or not all(isinstance(entry, dict) for entry in held):
            raise UserError(f"{annotations} has no list of {part}; COCO's format has images, annotations and categories")
    return content


def _of(entry: dict, key: str, annotations: str) -> Any:
    if key not in entry:
        raise UserError(f"an entry of {annotations} has no {key}: {json.dumps(entry)[:80]}; COCO's format has one")
    return entry[key]


def _classes(categories: list[dict], annotations: str) -> Classes:
    names = {_of(category, "id", annotations): str(category.get("name", category["id"])) for category in categories}
    if not names:
        raise UserError(f"{annotations} has no categories; give at least one")
    if len(names) < len(categories):
        raise UserError(f"{annotations} gives one id to several categories; give each its own")
    ids = tuple(sorted(names))
    return Classes(ids, tuple(names[number] for number in ids))


def _check(one: dict, images: dict, labels: dict, annotations: str) -> None:
    name = f"annotation {one.get('id', '(without an id)')} of {annotations}"
    box = one.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(value, int | float) for value in box):
        raise UserError(f"{name} has no bbox of four numbers (x, y, width, height); a detector needs one for each object")
    if _of(one, "image_id", annotations) not in images:
        raise UserError(f"{name} belongs to image {one['image_id']}, which is not in the list of images")
    if _of(one, "category_id", annotations) not in labels:
        raise UserError(f"{name} has category {one['category_id']}, which is none of the training set's ({', '.join(map(str, labels))})")


def _picture(image: dict, entries: list[dict], folder: Path, label_of: dict, annotations: str) -> tuple[Picture, int]:
    """The picture, and how many of its boxes are degenerate."""
    path = folder / str(_of(image, "file_name", annotations))
    width, height = (_of(image, key, annotations) for key in ("width", "height"))
    if not all(isinstance(side, int) and side > 0 for side in (width, height)):
        raise UserError(f"image {image['id']} of {annotations} is {width} wide and {height} high; give its size in whole pixels")
    if not path.is_file():
        raise UserError(f"{path}, image {image['id']} of {annotations}, does not exist; give the folder that it lies in")
    boxes, labels, areas, crowd = [], [], [], []
    for one in entries:
        x, y, w, h = one["bbox"]
        box = [max(0.0, x), max(0.0, y), min(float(width), x + w), min(float(height), y + h)]
        if not all(map(math.isfinite, one["bbox"])) or box[2] <= box[0] or box[3] <= box[1]:
            continue
        boxes.append(box)
        labels.append(label_of[one["category_id"]])
        areas.append(float(one.get("area", w * h)))
        crowd.append(bool(one.get("iscrowd", 0)))
    picture = Picture(
        path, width, height, torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), torch.tensor(labels, dtype=torch.int64),
        torch.tensor(areas, dtype=torch.float32), torch.tensor(crowd, dtype=torch.bool),
    )  # fmt: skip
    return picture, len(entries) - len(boxes)
