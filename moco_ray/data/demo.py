"""Data sets to try the trainer on: Fashion-MNIST, and drawn prototypes for a learning test.

Responsible for finding Fashion-MNIST's four files and checking them, for drawing the generated set, and
for writing both as folders of Parquet shards (columns `image` PNG bytes, `label` int64, `id` string). Not
responsible for packing a user's own images (see pack.py), nor for reading anything back (see shards.py).
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from moco_ray.errors import UserError

ROWS_PER_ROW_GROUP = 128  # the unit that training reads
ROWS_PER_SHARD = 50 * ROWS_PER_ROW_GROUP
FORMAT_VERSION = 1
SUMMARY = "summary.json"
SHARD = "part-{}.parquet"

INSTALLED = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts the files
DEBIAN_PACKAGE = "dataset-fashion-mnist"
ATTEMPT_SECONDS = 120.0  # for one command of one attempt
FASHION_SEED = 0

# SHA-256 of the unpacked files. The packed ones differ from place to place by their gzip header.
FASHION_FILES = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
)  # fmt: skip
IDX_MAGIC = {1: 0x00000801, 3: 0x00000803}  # unsigned bytes in one or three dimensions

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


class Split(NamedTuple):
    """One folder of a data set, in the order in which it is written."""

    name: str
    images: list[bytes]  # PNG
    labels: np.ndarray  # rows, int64
    ids: list[str]


def fashion_mnist(target: Path, source: Path | None = None, validation_rows: int = 10_000) -> dict:
    """Write Fashion-MNIST (Xiao et al. 2017, MIT licence) below `target` and return its summary.

    `target`/train holds the first rows of a seeded shuffle of the 60,000 training images,
    `target`/validation the other `validation_rows`, `target`/test the 10,000 test images, shuffled too:
    28x28 grey PNGs. With `source`, a folder of the four idx files (.gz or unpacked, also nested as
    FashionMNIST/raw) is read, and nothing else is tried. Without, in this order: Debian's package as
    installed, the same package fetched with apt-get (no root needed), torchvision's download.

    A whole `target` of the same arguments is left alone; one that lost some of its shards is rebuilt. It is
    written elsewhere and renamed, so it is whole or absent. The same pixels, labels and order come out everywhere;
    the PNG bytes depend on Pillow's zlib. Raises UserError that lists what was tried and why it failed.
    """
    identity = {"data": "fashion-mnist", "version": FORMAT_VERSION, "validation_rows": validation_rows}

    def make(scratch: Path) -> tuple[str, list[Split]]:
        if source is None:
            origin, arrays = _search(scratch)
        else:
            origin, arrays = f"the folder {source}", _read_fashion(_locate(Path(source)))
        return origin, _fashion_splits(arrays, validation_rows)

    return _write_once(Path(target), identity, FASHION_CLASSES, make)


def _fashion_splits(arrays: dict[str, np.ndarray], validation_rows: int) -> list[Split]:
    images, labels = arrays["train-images-idx3-ubyte"], arrays["train-labels-idx1-ubyte"]
    if not 0 < validation_rows < len(labels):
        raise UserError(
            f"validation_rows {validation_rows} leaves no rows to train or validate on; choose 1 to {len(labels) - 1}"
        )
    order = _shuffled(len(labels), FASHION_SEED)
    train, validation = order[:-validation_rows], order[-validation_rows:]
    test_images, test_labels = arrays["t10k-images-idx3-ubyte"], arrays["t10k-labels-idx1-ubyte"]
    return [
        _published_split("train", "train", images, labels, train),
        _published_split("validation", "train", images, labels, validation),
        _published_split("test", "test", test_images, test_labels, _shuffled(len(test_labels), FASHION_SEED)),
    ]


def _published_split(name: str, file: str, images: np.ndarray, labels: np.ndarray, order: np.ndarray) -> Split:
    ids = [f"{file}-{index:05d}" for index in order]  # the image's place in the published file
    return Split(name, [_png(images[index]) for index in order], labels[order].astype(np.int64), ids)


def _search(scratch: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The first attempt that gives four sound files: its name and the arrays. Raises UserError with all failures."""
    attempts = (
        (f"the folder {INSTALLED}", lambda: INSTALLED),
        (f"Debian's package {DEBIAN_PACKAGE} by apt-get", lambda: _debian_package(scratch)),
        ("torchvision's download", lambda: _torchvision_download(scratch)),
    )
    failures = []
    for name, folder in attempts:
        try:
            return name, _read_fashion(_locate(folder()))
        except (UserError, OSError) as error:
            failures.append(f"{name} failed ({error})")
    raise UserError(
        f"Fashion-MNIST was not found: {'; '.join(failures)}. Fetch its four idx.gz files on a machine with internet "
        "access and give the folder that holds them as the source"
    )


def _debian_package(scratch: Path) -> Path:
    """Fetch and unpack the package below `scratch`; needs apt-get and dpkg, but no root. Raises UserError, OSError."""
    folder = scratch / "apt"
    folder.mkdir()
    network = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20"]
    try:
        _command(["apt-get", *network, "download", DEBIAN_PACKAGE], folder)
    except UserError:  # a machine or image without package lists: fetch our own, beside the system's
        own = [f"Dir::State={folder}/state", f"Dir::Cache={folder}/cache", "Dir::State::status=/var/lib/dpkg/status"]
        for part in ("state/lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        options = [*network, *(word for setting in own for word in ("-o", setting))]
        _command(["apt-get", *options, "update"], folder)
        _command(["apt-get", *options, "download", DEBIAN_PACKAGE], folder)
    archives = list(folder.glob(f"{DEBIAN_PACKAGE}_*.deb"))
    if len(archives) != 1:
        raise UserError(f"apt-get left {len(archives)} packages, not one")
    _command(["dpkg", "-x", str(archives[0]), str(folder / "root")], folder)
    return folder / "root" / INSTALLED.relative_to("/")


def _torchvision_download(scratch: Path) -> Path:
    """Let torchvision fetch the files, in a process of its own so that it can be stopped. Raises UserError, OSError."""
    folder = scratch / "torchvision"
    folder.mkdir()
    program = "import sys, torchvision; torchvision.datasets.FashionMNIST(sys.argv[1], download=True)"
    _command([sys.executable, "-c", program, str(folder)], folder)
    return folder


def _command(words: list[str], folder: Path) -> None:
    """Run a command in `folder` for at most ATTEMPT_SECONDS. Raises UserError with its last line of output."""
    log = folder / "log"
    with log.open("wb") as output:  # a file, not a pipe: a grandchild that lives on must not keep us waiting
        try:
            code = subprocess.run(
                words, check=False, cwd=folder, timeout=ATTEMPT_SECONDS,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{words[0]} took longer than {ATTEMPT_SECONDS:g} s") from error
    if code:
        lines = log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise UserError(f"{Path(words[0]).name} left with code {code}: {last}")


def _locate(folder: Path) -> dict[str, Path]:
    """Where each of the four files lies in `folder`. Raises UserError if one is missing."""
    found = {}
    for name in FASHION_FILES:
        places = [folder / inner / file for inner in ("", "raw", "FashionMNIST/raw") for file in (f"{name}.gz", name)]
        found[name] = next((place for place in places if place.is_file()), None)
    missing = [f"{name}.gz" for name, place in found.items() if place is None]
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)}")
    return found


def _read_fashion(files: dict[str, Path]) -> dict[str, np.ndarray]:
    """The four arrays: images rows,28,28 uint8 and labels rows uint8. Raises UserError if one is not as published."""
    arrays = {name: _read_idx(path, FASHION_FILES[name]) for name, path in files.items()}
    for part in ("train", "t10k"):
        images, labels = len(arrays[f"{part}-images-idx3-ubyte"]), len(arrays[f"{part}-labels-idx1-ubyte"])
        if images != labels:
            raise UserError(f"{part} has {images} images, but {labels} labels; get the files again")
    return arrays


def _read_idx(path: Path, sha256: str) -> np.ndarray:
    """An idx file (big-endian magic and sizes, then bytes) as uint8. Raises UserError if it is damaged."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} is damaged ({error}); get it again") from error
    dimensions = 3 if "idx3" in path.name else 1
    header = np.frombuffer(content[: 4 + 4 * dimensions], dtype=">u4") if len(content) >= 4 + 4 * dimensions else [0]
    if header[0] != IDX_MAGIC[dimensions]:
        raise UserError(f"{path} does not begin with {IDX_MAGIC[dimensions]:#010x}: not an idx file of this kind")
    shape = [int(size) for size in header[1:]]
    body = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions)
    if body.size != np.prod(shape, dtype=np.int64):
        raise UserError(f"{path} holds {body.size} bytes, but promises {shape}; get it again")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path} is not the published file (its SHA-256 differs); get it again")
    return body.reshape(shape)


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

    return _write_once(Path(target), identity, tuple(f"prototype {n}" for n in range(PROTOTYPES)), make)


def _drawn_split(name: str, prototypes: list[Image.Image], rows: int, key: list[int], pixels: int) -> Split:
    labels = np.random.default_rng(key).permutation(rows) % len(prototypes)
    images = [
        _png(_view(prototypes[label], np.random.default_rng([*key, row]), pixels)) for row, label in enumerate(labels)
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


def _shuffled(rows: int, seed: int) -> np.ndarray:
    """A permutation of `rows`, int64. From raw PCG64 bits, which NumPy promises to keep from version to version."""
    return np.argsort(np.random.PCG64(seed).random_raw(rows), kind="stable")


def _png(pixels: np.ndarray) -> bytes:
    """H,W uint8 grey as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _write_once(
    target: Path, identity: dict, classes: tuple[str, ...], make: Callable[[Path], tuple[str, list[Split]]]
) -> dict:
    """Return the summary of a whole `target`, building it first if there is none; `already_there` says which."""
    summary = _recognise(target, identity)
    if summary is not None:
        return {**summary, "already_there": True}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        origin, splits = make(Path(scratch).resolve())  # commands run inside it, so their paths must be whole
        whole = Path(scratch, "whole")
        for split in splits:
            _write_split(whole / split.name, split)
        summary = {
            "arguments": identity,
            "origin": origin,
            "classes": list(classes),
            "rows": {split.name: len(split.ids) for split in splits},
            "bytes": {str(path.relative_to(whole)): path.stat().st_size for path in sorted(whole.glob("*/*.parquet"))},
        }
        (whole / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        if target.is_dir():
            shutil.rmtree(target)  # empty or incomplete, and ours: _recognise has looked
        os.replace(whole, target)
    return {**summary, "already_there": False}


def _recognise(target: Path, identity: dict) -> dict | None:
    """The summary of a whole target; None if it must be built. Raises UserError where building would destroy.

    Only an empty folder, or one that holds a summary, its shards and nothing else, may be replaced: shards
    without a summary may be somebody's own.
    """
    if not target.exists():
        return None
    files = [path for path in target.rglob("*") if not path.is_dir()] if target.is_dir() else [target]
    known = target / SUMMARY in files
    foreign = [path for path in files if path != target / SUMMARY and not (known and path.match(SHARD.format("?????")))]
    if foreign:
        raise UserError(f"{foreign[0]} was not written by demo-data; choose an empty or new folder as the target")
    try:
        summary = json.loads((target / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or a cut one
        return None
    if not isinstance(summary, dict) or not {"arguments", "bytes"} <= summary.keys():
        raise UserError(f"{target / SUMMARY} was not written by demo-data; choose an empty or new folder as the target")
    shards = {name: target / name for name in summary["bytes"]}
    whole = all(path.is_file() and path.stat().st_size == summary["bytes"][name] for name, path in shards.items())
    if whole and summary["arguments"] != identity:
        raise UserError(
            f"{target} holds the data set of {summary['arguments']}, not {identity}; delete it or choose another target"
        )
    return summary if whole else None


def _write_split(folder: Path, split: Split) -> None:
    folder.mkdir(parents=True)
    table = pa.table(
        {
            "image": pa.array(split.images, pa.binary()),
            "label": pa.array(split.labels, pa.int64()),
            "id": pa.array(split.ids, pa.string()),
        }
    )
    for shard, start in enumerate(range(0, table.num_rows, ROWS_PER_SHARD)):
        pq.write_table(
            table.slice(start, ROWS_PER_SHARD),
            folder / SHARD.format(f"{shard:05d}"),
            row_group_size=ROWS_PER_ROW_GROUP,
            compression="none",  # a PNG is compressed already
            use_dictionary=False,
        )
