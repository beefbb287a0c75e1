"""The photos of the input benchmark: which they are, and some hundred JPEGs like ImageNet's made from them.

The 15 photos come with packages on PyPI; their hashes are pinned, so that every run has the same ones. They are *all*
colour photographs of at least 300 pixels a side that these four packages ship, but the second image of a stereo pair:
listed before anything was measured. matplotlib is a dependency of ours; for the other three, from the repository's root:

    .venv/bin/pip install --no-deps --target data/bench-photos scikit-image==0.26.0 scikit-learn==1.9.1 gradio==6.31.0

(170 MB. Nothing of them is imported. They are no extra of pyproject.toml because gradio asks for Pillow below 13.)

A stand-in, not ImageNet: few scenes, resampled. Size in bytes and pixels is ImageNet's (about 110 KB, 500x375).
"""

import hashlib
import io
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFilter

INSTALL = "pip install --no-deps --target data/bench-photos"
FOLDER = Path(__file__).parents[2] / "data" / "bench-photos"
SIZES = ((500, 375), (500, 333))  # the longer side first
SEED = 2026
NOISE = 5.0  # of 255: with it a JPEG has about the bytes of one of ImageNet's


class Photo(NamedTuple):
    """A file of a package, below its folder of installed packages."""

    package: str  # as pip names it, with the version that was hashed
    path: str
    sha256: str


PHOTOS = (
    Photo("scikit-image==0.26.0", "skimage/data/astronaut.png", "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5"),
    Photo("scikit-image==0.26.0", "skimage/data/chelsea.png", "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb"),
    Photo("scikit-image==0.26.0", "skimage/data/coffee.png", "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7"),
    Photo("scikit-image==0.26.0", "skimage/data/hubble_deep_field.jpg", "3a19c5dd8a927a9334bb1229a6d63711b1c0c767fb27e2286e7c84a3e2c2f5f4"),
    Photo("scikit-image==0.26.0", "skimage/data/ihc.png", "f8dd1aa387ddd1f49d8ad13b50921b237df8e9b262606d258770687b0ef93cef"),
    Photo("scikit-image==0.26.0", "skimage/data/motorcycle_left.png", "db18e9c4157617403c3537a6ba355dfeafe9a7eabb6b9b94cb33f6525dd49179"),
    Photo("scikit-image==0.26.0", "skimage/data/retina.jpg", "38a07f36f27f095e818aea7b96d34202c05176d30253c66733f2e00379e9e0e6"),
    Photo("scikit-image==0.26.0", "skimage/data/rocket.jpg", "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c"),
    Photo("scikit-learn==1.9.1", "sklearn/datasets/images/china.jpg", "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29"),
    Photo("scikit-learn==1.9.1", "sklearn/datasets/images/flower.jpg", "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638"),
    Photo("gradio==6.31.0", "gradio/media_assets/images/cheetah.jpg", "29b0090f5ec471dad0264abc20ecc3c80a0133a63a03d11df920e39a093fe6c8"),
    Photo("gradio==6.31.0", "gradio/media_assets/images/groot.jpeg", "fff4d05d30088da0f073ae4ab21d22d11cbd56cfab711f3c359faabbf8577076"),
    Photo("gradio==6.31.0", "gradio/media_assets/images/tower.jpg", "f57f96f7a71f89739d27ae8ffc09f73cd2f17415d16c94d42dcb0d571f4eb0ee"),
    Photo("gradio==6.31.0", "gradio/test_data/cheetah2.jpg", "6882e714aa43d60a429f704a5ddd3af4b3708f89701b3bcc9626121349853795"),
    Photo("matplotlib==3.11.2", "matplotlib/mpl-data/sample_data/grace_hopper.jpg", "a8ca6d734765703b09728ab47fe59f473d93ae3967fc24c7c0288c3c7adb7130"),
)  # fmt: skip


def read(photo: Photo) -> bytes:
    """The photo's file, wherever the package is installed. Raises FileNotFoundError or ValueError with the cure."""
    cure = f"install it: {INSTALL} {photo.package}"
    places = [Path(folder) / photo.path for folder in (FOLDER, *sys.path)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no {photo.path} of {photo.package} in {FOLDER} nor among the installed; {cure}")
    data = found.read_bytes()
    if hashlib.sha256(data).hexdigest() != photo.sha256:
        raise ValueError(f"{found} is not the photo that is pinned (sha256 {photo.sha256[:16]}...); {cure}")
    return data


def originals(count: int) -> list[bytes]:
    """`count` JPEGs, the photos in turn: seeded crops of 80-100 % of a side, sharpened and noisy as a camera's are.

    Three in four at 4:2:0, the others 4:4:4; quality 90-97. The same bytes for the same Pillow and numpy.
    """
    opened = [Image.open(io.BytesIO(read(photo))).convert("RGB") for photo in PHOTOS]
    return [_variant(opened[number % len(opened)], number) for number in range(count)]


def _variant(photo: Image.Image, number: int) -> bytes:
    draws = np.random.default_rng([SEED, number])
    size = SIZES[int(draws.random() < 0.25)]
    if photo.height > photo.width:
        size = size[::-1]
    scale = min(photo.width / size[0], photo.height / size[1]) * draws.uniform(0.8, 1.0)  # of the largest that fits
    width, height = size[0] * scale, size[1] * scale
    left, top = draws.uniform(0, photo.width - width), draws.uniform(0, photo.height - height)
    image = photo.resize(size, Image.Resampling.LANCZOS, box=(left, top, left + width, top + height))
    image = image.filter(ImageFilter.UnsharpMask(radius=1, percent=100, threshold=0))
    pixels = np.asarray(image) + draws.normal(0, NOISE, (size[1], size[0], 3))
    image = Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
    subsampling = 0 if draws.random() < 0.25 else 2  # Pillow's numbers of 4:4:4 and 4:2:0
    return _jpeg(image, quality=int(draws.integers(90, 98)), subsampling=subsampling)


def packed(encoded: bytes, short_side: int) -> bytes:
    """The same image with its shorter side at `short_side` pixels, quality 90, 4:2:0, as `moco-ray pack` does it."""
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    scale = short_side / min(image.size)
    size = tuple(round(side * scale) for side in image.size)
    return _jpeg(image.resize(size, Image.Resampling.LANCZOS), quality=90, subsampling=2, optimize=True)


def _jpeg(image: Image.Image, **settings) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, "jpeg", **settings)
    return encoded.getvalue()
