"""The generated set: grey prototypes under the nuisances that the augmentation removes, for a learning test.

Responsible for drawing it. Not responsible for writing it (demo_shards.py).
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from moco_ray.data.demo_shards import FORMAT_VERSION, Split, png, write_once
from moco_ray.errors import UserError

# The generated set. Tuned, over two seeds, until 1-NN from 10 labels per class gives 0.35 to 0.39 on raw pixels
# (cosine) and 0.20 on a small untrained net, 0.05 being chance: room to learn, and nothing to gain from pixels.
PROTOTYPES = 20
PROTOTYPE_PIXELS = 96
GROUND, DISC = 128, 200  # greys; every prototype is a disc with other marks, so outlines tell nothing
MARK_REACH = (0.1, 0.25)  # half the width of a mark, as a share of the prototype's side
CROP_AREA = (0.3, 1.0)
TURN_DEGREES = 25.0
CONTRAST, BRIGHTNESS = (0.6, 1.4), (0.7, 1.3)
NOISE = 5.0  # standard deviation, of 255


def drawn_prototypes(target: Path, rows: int = 12_800, test_rows: int = 2_000, seed: int = 0, pixels: int = 36) -> dict:
    """Write the generated set for a learning test below `target` and return its summary.

    Twenty prototypes are drawn in grey; each of `rows` images (`target`/train) and `test_rows` images
    (`target`/test) shows one of them, in equal shares, under the nuisances that the augmentation removes:
    crop, flip, small turn, brightness, contrast, a little noise. PNGs of `pixels` by `pixels`. Grey and
    without clutter on purpose: a colour or a background drawn for each image tells the images apart, and
    an encoder then learns that and not the prototype. So the set shows that the machinery learns, not that
    features transfer to photographs.

    The same arguments give the same pixels where NumPy and Pillow are the same. A whole `target` is left
    alone and an incomplete one rebuilt, as in `fashion_mnist`. Raises UserError.
    """
    if min(rows, test_rows) < PROTOTYPES or pixels < 8:
        raise UserError(
            f"rows {rows} and test_rows {test_rows} must be at least {PROTOTYPES}, one image of each prototype, "
            f"and pixels {pixels} at least 8"
        )
    identity = {"data": "drawn-prototypes", "version": FORMAT_VERSION}
    identity |= {"rows": rows, "test_rows": test_rows, "seed": seed, "pixels": pixels}

    def make(_scratch: Path) -> tuple[str, list[Split]]:
        prototypes = [_draw_prototype(np.random.default_rng([seed, 0, label])) for label in range(PROTOTYPES)]
        train = _drawn_split("train", prototypes, rows, [seed, 1], pixels)
        return "drawn by moco_ray", [train, _drawn_split("test", prototypes, test_rows, [seed, 2], pixels)]

    return write_once(Path(target), identity, tuple(f"prototype {n}" for n in range(PROTOTYPES)), make)


def _drawn_split(name: str, prototypes: list[Image.Image], rows: int, key: list[int], pixels: int) -> Split:
    labels = np.random.default_rng(key).permutation(rows) % len(prototypes)
    images = [
        png(_view(prototypes[label], np.random.default_rng([*key, row]), pixels)) for row, label in enumerate(labels)
    ]
    return Split(name, images, labels.astype(np.int64), [f"{name}-{row:05d}" for row in range(rows)])


def _draw_prototype(random: np.random.Generator) -> Image.Image:
    """A disc with an ellipse, a polygon and a stroke on it, in any order, lighter or darker than the ground."""
    image = Image.new("L", (PROTOTYPE_PIXELS, PROTOTYPE_PIXELS), GROUND)
    draw = ImageDraw.Draw(image)
    draw.ellipse([0.08 * PROTOTYPE_PIXELS] * 2 + [0.92 * PROTOTYPE_PIXELS] * 2, fill=DISC)
    for kind in random.permutation(["ellipse", "polygon", "stroke"]):
        grey = GROUND + int(random.integers(40, 100)) * int(random.choice([-1, 1]))
        centre = random.uniform(0.2, 0.8, 2) * PROTOTYPE_PIXELS
        reach = random.uniform(*MARK_REACH, 2) * PROTOTYPE_PIXELS
        if kind == "ellipse":
            draw.ellipse([*(centre - reach), *(centre + reach)], fill=grey)
        elif kind == "polygon":
            angles = np.sort(random.uniform(0.0, 2.0 * np.pi, random.integers(3, 7)))
            corners = centre + np.stack([np.cos(angles), np.sin(angles)], axis=1) * 1.3 * reach
            draw.polygon([tuple(corner) for corner in corners], fill=grey)
        else:
            points = random.uniform(0.1, 0.9, (4, 2)) * PROTOTYPE_PIXELS
            draw.line([tuple(point) for point in points], fill=grey, width=7, joint="curve")
    return image


def _view(prototype: Image.Image, random: np.random.Generator, pixels: int) -> np.ndarray:
    """One sight of a prototype under the nuisances: pixels,pixels uint8."""
    stretch = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)) / 2)
    side = np.sqrt(random.uniform(*CROP_AREA))
    size = PROTOTYPE_PIXELS * np.minimum([side * stretch, side / stretch], 1.0)  # width, height of the crop
    centre = size / 2 + random.uniform(0.0, 1.0, 2) * (PROTOTYPE_PIXELS - size)
    angle = np.deg2rad(random.uniform(-TURN_DEGREES, TURN_DEGREES))
    flip = random.choice([-1.0, 1.0])
    fine = 2 * pixels  # sampled at twice the size, then averaged: edges are smooth
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turn @ np.diag([flip * size[0], size[1]]) / fine  # from the view's places to the prototype's
    offset = centre - matrix @ [pixels, pixels]
    places = (*matrix[0], offset[0], *matrix[1], offset[1])
    affine, bilinear = Image.Transform.AFFINE, Image.Resampling.BILINEAR
    seen = prototype.transform((fine, fine), affine, places, bilinear, fillcolor=GROUND)
    grey = np.asarray(seen.reduce(2), dtype=np.float64)
    mean = grey.mean()
    grey = (grey - mean) * random.uniform(*CONTRAST) + mean * random.uniform(*BRIGHTNESS)
    grey += random.normal(0.0, NOISE, grey.shape)
    return np.clip(np.rint(grey), 0, 255).astype(np.uint8)
