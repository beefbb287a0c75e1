"""The crop stage: encoded bytes to uint8 crops. CPU only, no randomness of its own.

Responsible for decoding whatever lies in a data set, for naming what cannot be decoded, and for the
geometry: two random resized crops in training, the centre crop in evaluation. Not responsible for drawing the
uniforms (draws.py), for colour and normalisation (augment.py), nor for what becomes of a bad row (stream.py).
"""

import io
import math
import struct
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from PIL.AvifImagePlugin import AvifImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from torch import Tensor
from torchcodec.decoders import decode_image, decode_jpeg

from moco_ray.recipe import Augment

ASPECT_RATIO = (3.0 / 4.0, 4.0 / 3.0)  # of a random crop: torchvision's default, which the released code uses
CROP_TRIES = 10
CROP_DRAWS = 2 * CROP_TRIES + 2  # area and aspect ratio of each try, then the place: rows and columns

# What makes a row bad; each is one line in the run's count and in its quarantine file.
KINDS = (
    "empty",  # no bytes
    "not an image",  # no signature of an image format
    "unsupported",  # an image, but of a format or a coding that is not decoded (TIFF, BMP, HEIC, 12-bit JPEG)
    "too large",  # more pixels than the recipe allows, by its header
    "truncated",  # the bytes end before the image does
    "corrupt",  # the decoder refuses it for another reason
)

# Parts of the decoders' messages, in lower case, that tell these kinds from a plain "corrupt".
# torchcodec 0.17 and Pillow 13 have no exceptions for them; tests/test_decode.py guards the wording.
MESSAGES = {
    "truncated": ("truncated", "out of bound read", "not enough image data", "requires a buffer of at least"),
    "unsupported": ("unsupported", "not supported", "cannot handle"),
    "too large": ("decompression bomb",),  # Pillow's own limit, where it decodes the first frame
}

# Pillow's classes read a header without the process-wide limit that Image.open enforces: ours is in the recipe.
SIGNATURES = (
    (0, b"\xff\xd8\xff", JpegImageFile),
    (0, b"\x89PNG\r\n\x1a\n", PngImageFile),
    (0, b"GIF8", GifImageFile),
    (4, b"ftypavif", AvifImageFile),
    (4, b"ftypavis", AvifImageFile),
)
# TIFF, BMP, HEIC and its kin, JPEG 2000, Photoshop, JPEG XL, icons: named, so that one knows what to convert.
FOREIGN = (
    (0, b"II*\0"),
    (0, b"MM\0*"),
    (0, b"BM"),
    (4, b"ftyp"),
    (4, b"jP  "),
    (0, b"8BPS"),
    (0, b"\xff\x0a"),
    (0, b"\0\0\1\0"),
)


class BadImage(Exception):
    """Bytes that are no usable image. `kind` is one of KINDS. Survives pickling, for it is raised in a task."""

    def __init__(self, kind: str, message: str):
        assert kind in KINDS, kind
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Header(NamedTuple):
    """What is known before any pixel is decoded."""

    width: int
    height: int
    only_first: bool  # may hold more frames than the one that is wanted


def decode(encoded: bytes, max_pixels: int) -> Tensor:
    """Decode JPEG, PNG, WebP, GIF or AVIF, told apart by content, to 3,H,W uint8 RGB.

    Where there is a choice, it is this (found by experiment with torchcodec 0.17):
    - EXIF orientation is applied, as the decoder does (PIL's `convert`, and so the released code, ignores it);
    - alpha is dropped, palette transparency too: the stored colour stays, as in PIL's `convert("RGB")`;
    - gray is repeated three times; CMYK and YCCK become RGB by the plain formula, without a colour profile, bit for
      bit as PIL does it; 16 bits become 8 by rounding v / 257 (PIL would clip gray ones at 255);
    - of several frames the first is taken, and no other is decoded.
    A JPEG damaged inside that still ends with its end marker is decoded as far as libjpeg understands it and is *not*
    detected: neither torchcodec nor PIL reports it.

    The size is checked by the header, before pixels are allocated. Raises BadImage whatever is wrong with the
    bytes, and only then: out of memory is not the image's fault and passes through.
    """
    try:
        header = read_header(encoded)
        if header.width * header.height > max_pixels:
            raise BadImage("too large", f"{header.width}x{header.height} pixels; data.max_image_pixels is {max_pixels}")
        if header.only_first:
            return _first_frame(encoded)
        # A tensor of our own, for decode_image(bytes) changes the process's warning filters at every call.
        decoder = decode_jpeg if encoded.startswith(b"\xff\xd8\xff") else decode_image  # the latter looks a while
        return decoder(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), mode="RGB")
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # whatever a parser raises on hostile bytes, it is the row that is bad
        if "allocate memory" in str(error):  # torch's RuntimeError
            raise
        raise BadImage(*_told(error)) from error


def read_header(encoded: bytes) -> Header:
    """Width and height as stored (before any EXIF turn). Raises BadImage, or what Pillow raises on a bad header."""
    if not encoded:
        raise BadImage("empty", "0 bytes")
    if encoded[:4] == b"RIFF" and encoded[8:12] == b"WEBP":
        return _webp_header(encoded)
    if (header := _jpeg_header(encoded)) is not None:
        return header
    for offset, signature, image_file in SIGNATURES:
        if encoded.startswith(signature, offset):
            with image_file(io.BytesIO(encoded)) as image:
                first = image_file is GifImageFile or (image_file is AvifImageFile and image.is_animated)
                return Header(*image.size, first)
    for offset, signature in FOREIGN:
        if encoded.startswith(signature, offset):
            raise BadImage("unsupported", f"{len(encoded)} bytes that begin with {encoded[:12]!r}")
    raise BadImage("not an image", f"{len(encoded)} bytes that begin with {encoded[:16]!r}")


def _jpeg_header(encoded: bytes) -> Header | None:
    """Of an ordinary JPEG, in a tenth of Pillow's time; None leaves anything else, and every mistake, to Pillow.

    Ordinary: from the start to the frame header (baseline, extended or progressive, 8 bits, 1, 3 or 4 components) only
    segments that state their length. ITU-T T.81, annex B.
    """
    if not encoded.startswith(b"\xff\xd8\xff"):
        return None
    at = 2
    while at + 10 <= len(encoded) and encoded[at] == 0xFF:
        marker = encoded[at + 1]
        if marker in (0xC0, 0xC1, 0xC2):
            precision, height, width, components = struct.unpack_from(">BHHB", encoded, at + 4)
            ordinary = precision == 8 and width and height and components in (1, 3, 4)
            return Header(width, height, False) if ordinary else None
        if not (0xE0 <= marker <= 0xEF or marker in (0xC4, 0xDB, 0xDD, 0xFE)):  # APPn, DHT, DQT, DRI, COM
            return None
        at += 2 + int.from_bytes(encoded[at + 2 : at + 4])
    return None


def _webp_header(encoded: bytes) -> Header:
    """Read by hand, for Pillow has a size limit of its own here, and allocates the canvas.

    https://developers.google.com/speed/webp/docs/riff_container
    """
    stored = int.from_bytes(encoded[4:8], "little") + 8
    if len(encoded) < max(stored, 30):
        raise BadImage("truncated", f"a WebP of {stored} bytes ends after {len(encoded)}")
    chunk = encoded[12:16]
    if chunk == b"VP8X":
        width, height = (1 + int.from_bytes(encoded[at : at + 3], "little") for at in (24, 27))
        return Header(width, height, bool(encoded[20] & 0x02))
    if chunk == b"VP8L":
        bits = int.from_bytes(encoded[21:25], "little")
        return Header(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), False)
    if chunk == b"VP8 ":
        width, height = (int.from_bytes(encoded[at : at + 2], "little") & 0x3FFF for at in (26, 28))
        return Header(width, height, False)
    raise BadImage("corrupt", f"a WebP that begins with a chunk {chunk!r}")


def _first_frame(encoded: bytes) -> Tensor:
    """Pillow's first frame, where torchcodec would decode (and allocate) all of them."""
    with Image.open(io.BytesIO(encoded)) as image:
        return torch.from_numpy(np.array(ImageOps.exif_transpose(image.convert("RGB")))).permute(2, 0, 1)


def _told(error: Exception) -> tuple[str, str]:
    """The kind and the last words of a decoder's exception."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0].lower()
    kind = next((kind for kind, parts in MESSAGES.items() if any(part in text for part in parts)), "corrupt")
    return kind, f"{type(error).__name__}: {lines[0][:300]}"


def two_crops(image: Tensor, uniforms: np.ndarray, augment: Augment, crops: np.ndarray | None = None) -> np.ndarray:
    """Two random resized crops of 3,H,W uint8: 2,P,P,3 uint8, the query's view first; into `crops` if it is given.

    `uniforms` is 2,CROP_DRAWS float64 in [0, 1). Bilinear with antialiasing, within 1/255 of PIL's.
    """
    pixels = augment.image_pixels
    crops = np.empty((2, pixels, pixels, 3), dtype=np.uint8) if crops is None else crops
    stored = image.permute(1, 2, 0).numpy()  # H,W,3: as the decoder lays them
    for crop, draws in zip(crops, uniforms, strict=True):
        top, left, height, width = crop_box(*stored.shape[:2], draws, augment.crop_scale)
        _resize_into(stored[top : top + height, left : left + width], crop)
    return crops


def _resize_into(pixels: np.ndarray, crop: np.ndarray) -> None:
    """h,w,3 uint8 -> `crop`, P,P,3 uint8: `F.interpolate`, bilinear with antialiasing, bit for bit.

    Straight into its place: the operator that F.interpolate calls (of torch 2.14) takes an `out`, F.interpolate does not.
    Its fast path needs pixels that lie together, hence the copy.
    """
    source = torch.from_numpy(np.ascontiguousarray(pixels)[None]).permute(0, 3, 1, 2)  # 1,3,h,w channels_last
    target = torch.from_numpy(crop[None]).permute(0, 3, 1, 2)  # 1,3,P,P: the caller's memory
    torch.ops.aten._upsample_bilinear2d_aa.out(source, list(target.shape[2:]), False, None, None, out=target)


def crop_box(height: int, width: int, uniforms: np.ndarray, scale: tuple[float, float]) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random crop: torchvision's `RandomResizedCrop.get_params`, given its uniforms.

    https://github.com/pytorch/vision/blob/6247d96d3ce658d553e4e2ceea5cedd77f715b29/torchvision/transforms/transforms.py
    Up to 10 tries of an area uniform in `scale` and an aspect ratio log-uniform in 3/4..4/3; the first that fits is
    placed uniformly; if none fits, the largest centred crop within the ratios.
    `uniforms` (CROP_DRAWS): area and ratio of each try, then row and column of the place, whichever try it is for.
    """
    low, high = math.log(ASPECT_RATIO[0]), math.log(ASPECT_RATIO[1])
    *tries, (row, column) = uniforms.reshape(-1, 2).tolist()
    for area_draw, ratio_draw in tries:
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draw)
        ratio = math.exp(low + (high - low) * ratio_draw)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(row * (height - h + 1)), int(column * (width - w + 1)), h, w
    return central_box(height, width)


def central_box(height: int, width: int) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the largest centred crop whose aspect ratio is within 3/4..4/3."""
    h, w = height, width
    if width / height < ASPECT_RATIO[0]:
        h = round(width / ASPECT_RATIO[0])
    elif width / height > ASPECT_RATIO[1]:
        w = round(height * ASPECT_RATIO[1])
    return (height - h) // 2, (width - w) // 2, h, w


def centre_crop(image: Tensor, resize_pixels: int, image_pixels: int) -> np.ndarray:
    """The evaluation's view of 3,H,W uint8: shorter side to `resize_pixels`, then the centre: P,P,3 uint8.

    As torchvision's Resize (the longer side is rounded down) and CenterCrop. Of an image longer than 16 times its width
    only the middle is resized, which holds the crop: 1x5000 would otherwise become a gigabyte.
    Raises ValueError if the crop does not fit into the resized image.
    """
    if resize_pixels < image_pixels:
        raise ValueError(
            f"a centre crop of {image_pixels} pixels does not fit into a shorter side of {resize_pixels}; make "
            f"evaluation.resize_pixels at least augment.image_pixels"
        )
    limit = 16 * min(image.shape[1:])
    top, left = (max(side - limit, 0) // 2 for side in image.shape[1:])
    image = image[:, top : top + limit, left : left + limit]
    height, width = (resize_pixels * side // min(image.shape[1:]) for side in image.shape[1:])
    resized = _resized(image, height, width)
    top, left = round((height - image_pixels) / 2), round((width - image_pixels) / 2)
    return np.ascontiguousarray(resized[top : top + image_pixels, left : left + image_pixels])


def _resized(image: Tensor, height: int, width: int) -> np.ndarray:
    """3,h,w uint8 -> height,width,3 uint8, bilinear with antialiasing.

    On a planar view torch takes a path of half the speed, without a word: hence channels_last, here as there.
    """
    pixels = image.unsqueeze(0).contiguous(memory_format=torch.channels_last)
    pixels = F.interpolate(pixels, size=(height, width), mode="bilinear", antialias=True)  # 1,3,height,width
    return pixels[0].permute(1, 2, 0).numpy()
