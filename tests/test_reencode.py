"""Progressive JPEGs made baseline without loss, and large images made smaller: against the decoder and Pillow."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from moco_ray.data import reencode
from moco_ray.data.decode import BadImage, decode
from moco_ray.data.reencode import as_baseline, is_progressive, smaller
from tests.test_decode import ADOBE_TRANSFORM, encoded, patched, photograph

turbojpeg = pytest.importorskip("turbojpeg")
LIMIT = 10_000_000  # pixels
PHOTO = photograph(61, 83)


def progressive(image=PHOTO, **settings) -> bytes:
    return encoded(image, "JPEG", progressive=True, **settings)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = orientation
    return exif


def frame(data: bytes) -> int:
    """The start-of-frame marker, found by another reader than the code's: Pillow's list of markers."""
    image = Image.open(io.BytesIO(data))
    found = [marker for marker in range(0xC0, 0xD0) if bytes([0xFF, marker]) + len_of(image) in data]
    assert len(found) == 1, found
    return found[0]


def len_of(image: Image.Image) -> bytes:
    """The frame header after its marker: length, precision, height, width, components."""
    count = len(image.getbands())
    height, width = image.size[::-1]
    return b"".join([(8 + 3 * count).to_bytes(2, "big"), b"\x08", height.to_bytes(2, "big"), width.to_bytes(2, "big"), bytes([count])])  # fmt: skip


CMYK = progressive(Image.fromarray(photograph(61, 83, 4), "CMYK"))
PROGRESSIVE = {
    "4:4:4": progressive(subsampling=0, quality=95),
    "4:2:2": progressive(subsampling=1),
    "4:2:0": progressive(subsampling=2),
    "gray": progressive(PHOTO[..., 0]),
    "cmyk": CMYK,
    "ycck": patched(CMYK, CMYK.index(b"Adobe") + ADOBE_TRANSFORM, b"\x02"),
    "stored as rgb": progressive(keep_rgb=True),
    "exif turned": progressive(exif=turned(6)),
    "profile in several markers": progressive(icc_profile=bytes(range(256)) * 400),
    "restart markers": progressive(restart_marker_blocks=3),
    "1x1": progressive(PHOTO[:1, :1]),
    "1x5000": progressive(photograph(5000, 1)),
    "quality 1": progressive(quality=1),
    "quality 100": progressive(quality=100),
    "arithmetic coding": turbojpeg.transform(progressive(), perfect=False, progressive=True, arithmetic=True),
    "fill bytes before markers": progressive()[:2] + b"\xff\xff\xff" + progressive()[2:],
}


@pytest.mark.parametrize("data", PROGRESSIVE.values(), ids=PROGRESSIVE)
def test_a_progressive_jpeg_becomes_baseline_with_every_pixel_and_marker_the_same(data):
    assert is_progressive(data) and frame(data) in (0xC2, 0xCA)
    image = decode(data, LIMIT)
    result = as_baseline(data, image)
    assert frame(result) in (0xC0, 0xC1) and not is_progressive(result)
    assert torch.equal(decode(result, LIMIT), image)
    before, after = (Image.open(io.BytesIO(bytes_)) for bytes_ in (data, result))
    assert after.quantization == before.quantization and after.layer == before.layer  # tables; subsampling
    for key in ("exif", "icc_profile", "adobe", "adobe_transform", "jfif"):
        assert after.info.get(key) == before.info.get(key)


def test_the_exif_orientation_is_kept_and_still_applied():
    for orientation in range(1, 9):
        data = progressive(exif=turned(orientation))
        result = as_baseline(data, decode(data, LIMIT))
        assert Image.open(io.BytesIO(result)).getexif()[0x112] == orientation
        assert decode(result, LIMIT).shape == ((3, 61, 83) if orientation < 5 else (3, 83, 61))


@pytest.mark.parametrize("data", [
    encoded(PHOTO, "JPEG"), encoded(PHOTO, "PNG"), encoded(PHOTO, "WEBP"), b"", b"\xff\xd8", b"\xff\xd8\xff", b"text",
])  # fmt: skip
def test_what_is_no_progressive_jpeg_comes_back_unchanged(data):
    assert not is_progressive(data)
    assert as_baseline(data, torch.zeros(3, 61, 83, dtype=torch.uint8)) is data


def cut_to_scans(data: bytes, scans: int) -> bytes:
    """The first scans of a progressive JPEG and an end marker: a whole file of an image that is not refined."""
    starts = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    stop = starts[scans]
    while True:  # tables of the next scan go too
        before = data.rfind(b"\xff\xc4", 0, stop)
        if before < starts[scans - 1]:
            return data[:stop] + b"\xff\xd9"
        stop = before


def test_an_image_whose_scans_end_early_is_kept_progressive_for_baseline_would_look_different():
    data = cut_to_scans(progressive(quality=60), 1)
    image = decode(data, LIMIT)
    other = turbojpeg.transform(data, perfect=False, optimize=True)
    assert not torch.equal(decode(other, LIMIT), image)  # the decoder smooths blocks as long as it is progressive
    assert as_baseline(data, image) is data


def test_damaged_bytes_never_raise_and_never_change_the_pixels(capfd):
    rng, whole, made = np.random.default_rng(0), progressive(), 0
    for _ in range(600):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), rng.integers(1, 5)):
            data[at] = rng.integers(256)
        try:
            image = decode(bytes(data), LIMIT)
        except BadImage:
            continue
        result = as_baseline(bytes(data), image)
        assert torch.equal(decode(result, LIMIT), image)
        made += result != bytes(data)
    assert made > 20
    capfd.readouterr()  # libjpeg's warnings


def test_without_the_library_an_image_stays_progressive(monkeypatch):
    monkeypatch.setattr(reencode, "turbojpeg", None)
    data = progressive()
    assert as_baseline(data, decode(data, LIMIT)) is data and reencode.transform_version() == "none"


@pytest.mark.parametrize("height, width, expected", [(400, 600, (64, 96)), (600, 401, (96, 64)), (65, 65, (64, 64))])
def test_a_larger_image_gets_the_short_side_asked_for_and_looks_like_a_resize(height, width, expected):
    y, x, _ = np.mgrid[0:height, 0:width, 0:3]
    noise = np.random.default_rng(0).normal(0, 60, (height, width, 3))  # which only antialiasing averages away
    pixels = (60 + 60 * x / width + 80 * y / height + noise).clip(0, 255).astype(np.uint8)
    result = smaller(b"source", torch.from_numpy(pixels).permute(2, 0, 1), 64, 95)
    opened = Image.open(io.BytesIO(result))
    assert opened.format == "JPEG" and opened.size[::-1] == expected and frame(result) == 0xC0
    assert [part[1:3] for part in opened.layer] == [(2, 2), (1, 1), (1, 1)]  # 4:2:0
    if height > 65:
        reference = Image.fromarray(pixels).resize(expected[::-1], Image.Resampling.BOX)
        difference = np.abs(decode(result, LIMIT).permute(1, 2, 0).numpy().astype(int) - np.asarray(reference))
        assert difference.mean() < 8  # without antialiasing 32


def test_the_quality_is_the_one_asked_for():
    image = torch.from_numpy(photograph(200, 200)).permute(2, 0, 1)
    tables = [Image.open(io.BytesIO(smaller(b"", image, 100, quality))).quantization for quality in (30, 90)]
    expected = [Image.open(io.BytesIO(encoded(PHOTO, "JPEG", quality=quality))).quantization for quality in (30, 90)]
    assert tables == expected and tables[0] != tables[1]


@pytest.mark.parametrize("height, width", [(64, 64), (64, 5000), (10, 12), (1, 1)])
def test_an_image_that_is_not_larger_comes_back_unchanged(height, width):
    assert smaller(b"source", torch.zeros(3, height, width, dtype=torch.uint8), 64, 90) == b"source"


def test_an_image_too_long_for_a_jpeg_comes_back_unchanged():
    assert smaller(b"source", torch.zeros(3, 2, 140_000, dtype=torch.uint8), 1, 90) == b"source"
    assert smaller(b"source", torch.zeros(3, 2, 120_000, dtype=torch.uint8), 1, 90) != b"source"


def test_a_smaller_image_is_upright_and_carries_no_orientation():
    for orientation in range(1, 9):
        data = encoded(photograph(90, 200), "JPEG", exif=turned(orientation))
        image = decode(data, LIMIT)
        result = smaller(data, image, 45, 90)
        assert 0x112 not in Image.open(io.BytesIO(result)).getexif()
        assert decode(result, LIMIT).shape == (3, *(side // 2 for side in image.shape[1:]))
