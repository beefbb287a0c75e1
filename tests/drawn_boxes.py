"""A small COCO set, drawn: grey shapes of three classes on a grey texture, so that colour tells nothing. Seeded."""

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CATEGORIES = [{"id": 12, "name": "ring"}, {"id": 3, "name": "square"}, {"id": 7, "name": "triangle"}]  # with gaps, in no order


def drawn_boxes(folder: Path, images: int, seed: int, sides: tuple[int, int]) -> Path:
    """Write `images` PNGs into folder/images, and folder/boxes.json; its path. One to three shapes each, apart from each other.

    A side has sides[0] to sides[1] pixels.
    """
    draw = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    content = {"images": [], "annotations": [], "categories": CATEGORIES}
    for number in range(images):
        width, height = (int(side) for side in draw.integers(sides[0], sides[1] + 1, 2))
        coarse = draw.integers(90, 150, (height // 4 + 1, width // 4 + 1), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        canvas = ImageDraw.Draw(picture)
        columns = draw.permutation(3)[: draw.integers(1, 4)]  # a third of the width for each
        for column in columns:
            side = int(draw.integers(14, width // 3))
            x = int(column) * (width // 3) + int(draw.integers(0, width // 3 - side + 1))
            y = int(draw.integers(0, height - side + 1))
            category = CATEGORIES[draw.integers(3)]
            _shape(canvas, category["name"], (x, y, x + side - 1, y + side - 1), int(draw.choice([20, 235])))
            content["annotations"].append({
                "id": len(content["annotations"]), "image_id": 100 + number, "category_id": category["id"],
                "bbox": [x, y, side, side], "area": side * side, "iscrowd": 0,
            })  # fmt: skip
        picture.save(folder / "images" / f"{number}.png")
        content["images"].append({"id": 100 + number, "file_name": f"{number}.png", "width": width, "height": height})
    (folder / "boxes.json").write_text(json.dumps(content))
    return folder / "boxes.json"


def _shape(canvas: ImageDraw.ImageDraw, name: str, box: tuple[int, int, int, int], grey: int) -> None:
    x0, y0, x1, y1 = box
    if name == "square":
        canvas.rectangle(box, fill=grey)
    elif name == "triangle":
        canvas.polygon([(x0, y1), (x1, y1), ((x0 + x1) // 2, y0)], fill=grey)
    else:
        canvas.ellipse(box, outline=grey, width=3)
