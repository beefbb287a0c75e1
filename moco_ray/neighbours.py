"""`moco-ray neighbours`: what a backbone takes for alike, as a sheet of images and in TensorBoard's projector.

Responsible for which rows are looked at, for reading them and for where the pictures go. Labels are not needed. Not responsible
for comparing and drawing (evaluate/sheet.py, evaluate/map.py).
"""

import io
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from moco_ray.data.shards import Manifest
from moco_ray.data.storage import Store
from moco_ray.data.stream import labelled_images
from moco_ray.data.survey import build_manifest
from moco_ray.errors import UserError
from moco_ray.evaluate.features import description
from moco_ray.evaluate.map import SHOWN, map_picture, project
from moco_ray.evaluate.sheet import nearest_others, sheet
from moco_ray.evaluate_run import opened
from moco_ray.recipe import Recipe
from moco_ray.session import lazily_spread, ray_session
from moco_ray.stages import Stages

BATCH_ROWS = 256
POINTS = 2000  # of the projector
THUMB_PIXELS = 32  # of the projector
_TAG = 0x4E


class Drawn(NamedTuple):
    """What is drawn from the data set, by a seed."""

    rows: int  # among which neighbours are looked for
    queries: int  # of the rows, each shown with
    nearest: int  # others
    seed: int = 0


def neighbours(place: str, data: str | None, drawn: Drawn, output: str | None, with_map: bool = False, debug: bool = False) -> str:
    """Write neighbours.png, an image and an embedding for TensorBoard, and with `with_map` map.png; lines for the user.

    The data set is by default the run's own. The map shows the points of the projector. Into `output`, by default the run's
    folder. Raises UserError for what cannot be.
    """
    rows, queries, nearest, seed = drawn
    if min(rows, queries, nearest) < 1:
        raise UserError(f"--rows {rows}, --queries {queries} and --nearest {nearest} must be at least 1")
    overrides = [f"data.uri={data}"] if data else []
    backbone, recipe, store = opened(place, [*overrides, "evaluation.label_column="], output)
    if store is None:
        raise UserError(f"{place} is a file: give --output FOLDER for the pictures")
    if not recipe.data.uri:
        raise UserError(f"{place} tells no data set: give --data URI")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    describe = description(backbone.module(), recipe.augment, device)
    view = recipe.evaluation.model_copy(update={"resize_pixels": backbone.preprocessing.resize_pixels})
    recipe = recipe.model_copy(update={"evaluation": view})
    with lazily_spread(1, debug) as spread:
        manifest = build_manifest(recipe.data.uri, recipe.data.image_column, spread)
        draw = np.random.default_rng([_TAG, seed])
        chosen = np.sort(draw.choice(manifest.rows, min(rows, manifest.rows), replace=False))
        with Stages(sys.stderr) as at, ray_session(1, debug):
            features, read, done = [], [], 0
            for batch in labelled_images(manifest, recipe, chosen, BATCH_ROWS):
                done += len(batch.crops) + len(batch.bad)
                at("features", done, len(chosen), "images")
                if len(batch.crops):
                    features.append(describe(batch.crops).cpu())
                    read.append(batch.rows.clone())
            held = torch.cat(features) if features else torch.zeros(0, 1)
            if len(held) <= nearest:
                raise UserError(f"{len(held)} images of {manifest.root} could be read: too few for --nearest {nearest}")
            numbers = torch.cat(read).numpy()
            asked = torch.from_numpy(np.sort(draw.choice(len(held), min(queries, len(held)), replace=False)))
            found = nearest_others(held, asked, nearest)
            points = torch.from_numpy(np.sort(draw.choice(len(held), min(POINTS, len(held)), replace=False)))
            wanted = torch.cat([asked, found.places.flatten(), points]).unique()
            at("reading the images to show")
            crops = _crops(manifest, recipe, numbers[wanted.numpy()])
    step = backbone.origin.get("step", 0)
    shown = {int(place): crops[number] for number, place in enumerate(wanted.tolist())}
    picture = sheet(
        np.stack([shown[n] for n in asked.tolist()]),
        np.stack([[shown[n] for n in line] for line in found.places.tolist()]),
        found.similarity.numpy(),
        f"nearest of {len(held)} images by the backbone{f', step {step}' if step else ''}; cosine similarity",
    )
    store.write("neighbours.png", picture)
    mapped = ""
    if with_map:
        about = f"{len(points)} images by the backbone{f', step {step}' if step else ''}"
        store.write("map.png", map_picture(project(held[points]), np.stack([shown[n] for n in points.tolist()]), about))
        mapped = f"{store.place('map.png')}: {len(points)} points, {min(SHOWN, len(points))} of them as images\n"
    _to_tensorboard(store, step, picture, held[points], [shown[n] for n in points.tolist()], numbers[points.numpy()])
    return (
        f"{store.place('neighbours.png')}: {len(asked)} queries, each with its {nearest} nearest of {len(held)} images\n{mapped}"
        f"projector:  tensorboard --logdir {store.place('tensorboard')}  ({len(points)} points)"
    )


def _crops(manifest: Manifest, recipe: Recipe, rows: np.ndarray) -> np.ndarray:
    """The evaluation's view of some rows that were readable a moment ago: N,P,P,3 uint8."""
    found = [batch.crops.numpy().copy() for batch in labelled_images(manifest, recipe, rows, BATCH_ROWS)]
    crops = np.concatenate(found)
    if len(crops) != len(rows):
        raise UserError(f"{len(rows) - len(crops)} images of {manifest.root} can no longer be read; is somebody changing it?")
    return crops


def _to_tensorboard(store: Store, step: int, picture: bytes, features: Tensor, thumbs: list[np.ndarray], rows: np.ndarray) -> None:
    """An image and an embedding, in a folder of their own beside the run's curves."""
    from torch.utils.tensorboard import SummaryWriter  # seconds to import

    small = [np.asarray(Image.fromarray(one).resize((THUMB_PIXELS, THUMB_PIXELS), Image.Resampling.BOX)) for one in thumbs]
    label_images = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).float() / 255
    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            with Image.open(io.BytesIO(picture)) as drawn:
                writer.add_image("neighbours", np.asarray(drawn.convert("RGB")), step, dataformats="HWC")
            names = [f"row {row}" for row in rows.tolist()]
            writer.add_embedding(features, metadata=names, label_img=label_images, global_step=step, tag="backbone")
        below = store.below(f"tensorboard/neighbours-step-{step}")
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                below.write(path.relative_to(folder).as_posix(), path.read_bytes())
