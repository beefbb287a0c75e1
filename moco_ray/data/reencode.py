"""Images encoded anew when a data set is packed: progressive JPEG to baseline without loss, large ones to a smaller size.

A baseline JPEG decodes in less than half the time of the same image in progressive scans, and it costs as many bytes.
Responsible for one image at a time. Not responsible for which images, nor for counting them (pack.py).

`turbojpeg` (a thin binding of libjpeg-turbo's own transform) moves the DCT coefficients, in memory; its wheels exist
for x86-64 up to Python 3.13, so it is an extra of its own. Where it is missing, progressive images stay as they are. `jpeglib` was looked at and
refused: it works by files in /tmp and global variables, rewrites marker and table numbers itself, and completes a cut
image in silence.
"""

import io
from importlib.metadata import PackageNotFoundError, version

import torch
from PIL import Image
from torch import Tensor

from moco_ray.data.decode import BadImage, decode

try:
    import turbojpeg
except ImportError:  # no wheel for this machine
    turbojpeg = None

LONGEST_JPEG_SIDE = 65_500  # libjpeg's own limit
PROGRESSIVE = (0xC2, 0xCA)  # start of frame: Huffman or arithmetic coding
FRAMES = range(0xC0, 0xD0)
NO_FRAMES = (0xC4, 0xC8, 0xCC)  # in that range: Huffman tables, reserved, arithmetic conditioning


def transform_version() -> str:
    """The version of what makes progressive JPEGs baseline; "none" where it is not installed."""
    try:
        return version("turbojpeg") if turbojpeg else "none"
    except PackageNotFoundError:
        return "unknown"


def is_progressive(encoded: bytes) -> bool:
    """Whether the bytes are a progressive JPEG, by their first frame header. Never raises."""
    at = 2
    while encoded[:2] == b"\xff\xd8" and encoded[at : at + 1] == b"\xff":
        marker = encoded[at + 1] if at + 1 < len(encoded) else 0
        if marker in FRAMES and marker not in NO_FRAMES:
            return marker in PROGRESSIVE
        at += 1 if marker == 0xFF else 2 + int.from_bytes(encoded[at + 2 : at + 4], "big")  # 0xFF: fill
    return False


def as_baseline(encoded: bytes, image: Tensor) -> bytes:
    """A progressive JPEG as the baseline JPEG of the same pixels; whatever else it is, the same bytes.

    `image` is what `decode` makes of the bytes (3,H,W uint8). Coefficients, quantisation, subsampling and all markers
    (EXIF with its orientation, ICC, Adobe) are kept. The result is decoded and compared with `image` before it is
    believed: an image whose scans end early is smoothed by the decoder only as long as it is progressive. Such ones,
    damaged ones, and those that the library refuses come back unchanged, so still progressive. Never raises.
    """
    if turbojpeg is None or not is_progressive(encoded):
        return encoded
    try:
        baseline = turbojpeg.transform(encoded, perfect=False, optimize=True)
        same = torch.equal(decode(baseline, image.shape[1] * image.shape[2]), image)
    except (RuntimeError, BadImage):  # RuntimeError: every error and every warning of libjpeg
        return encoded
    return baseline if same and not is_progressive(baseline) else encoded


def smaller(encoded: bytes, image: Tensor, short_side: int, quality: int) -> bytes:
    """A JPEG of `image` (3,H,W uint8, as `decode` gives it) whose shorter side has `short_side` pixels.

    An image that is not larger than that comes back unchanged, and so does one too long for a JPEG. Lossy: Lanczos
    with antialiasing, 4:2:0, `quality` as in libjpeg (1 to 100). Gray becomes colour; metadata goes, and with it the
    orientation, which `decode` has applied, and the colour profile, which nothing here reads.
    """
    height, width = image.shape[1:]
    if min(height, width) <= short_side:
        return encoded
    size = [max(1, round(side * short_side / min(height, width))) for side in (width, height)]
    if max(size) > LONGEST_JPEG_SIDE:
        return encoded
    resized = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(size, Image.Resampling.LANCZOS)
    file = io.BytesIO()
    resized.save(file, "JPEG", quality=quality, subsampling="4:2:0", optimize=True)
    return file.getvalue()
