"""Fashion-MNIST, the demo's data set: finds its four files, checks them and writes them as Parquet shards.

Not responsible for how the shards are written (demo_shards.py) nor for the generated set (prototypes.py).
"""

import gzip
import hashlib
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np

from moco_ray.data.demo_shards import FORMAT_VERSION, Split, png, shuffled, write_once
from moco_ray.errors import UserError

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

    return write_once(Path(target), identity, FASHION_CLASSES, make)


def _fashion_splits(arrays: dict[str, np.ndarray], validation_rows: int) -> list[Split]:
    images, labels = arrays["train-images-idx3-ubyte"], arrays["train-labels-idx1-ubyte"]
    if not 0 < validation_rows < len(labels):
        raise UserError(
            f"validation_rows {validation_rows} leaves no rows to train or validate on; choose 1 to {len(labels) - 1}"
        )
    order = shuffled(len(labels), FASHION_SEED)
    train, validation = order[:-validation_rows], order[-validation_rows:]
    test_images, test_labels = arrays["t10k-images-idx3-ubyte"], arrays["t10k-labels-idx1-ubyte"]
    return [
        _published_split("train", "train", images, labels, train),
        _published_split("validation", "train", images, labels, validation),
        _published_split("test", "test", test_images, test_labels, shuffled(len(test_labels), FASHION_SEED)),
    ]


def _published_split(name: str, file: str, images: np.ndarray, labels: np.ndarray, order: np.ndarray) -> Split:
    ids = [f"{file}-{index:05d}" for index in order]  # the image's place in the published file
    return Split(name, [png(images[index]) for index in order], labels[order].astype(np.int64), ids)


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
