"""Decoding whatever lies in a data set, by kind; crops against torchvision and PIL."""

import io
import math
import pickle
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision.transforms.transforms as torchvision_transforms
import torchvision.transforms.v2.functional as V
from PIL import Image, ImageOps

from moco_ray.data import decode as stage
from moco_ray.data.decode import CROP_DRAWS, KINDS, BadImage, centre_crop, crop_box, decode, two_crops
from moco_ray.recipe import Augment

LIMIT = 1_000_000  # pixels
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
ADOBE_TRANSFORM = 11  # offset in the Adobe marker of the byte that tells CMYK (0) from YCCK (2)


def photograph(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """height,width,channels uint8: smooth, with noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    planes = [127 + 100 * np.sin(x / (7 + 3 * c) + y / (11 - c) + seed) for c in range(channels)]
    return (np.stack(planes, -1) + rng.normal(0, 5, (height, width, channels))).clip(0, 255).astype(np.uint8)


def encoded(image: Image.Image | np.ndarray, file_format: str, **settings) -> bytes:
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    file = io.BytesIO()
    image.save(file, file_format, **settings)
    return file.getvalue()


def frames(file_format: str, **settings) -> bytes:
    rest = [Image.fromarray(photograph(30, 40, seed=s)) for s in (1, 2)]
    return encoded(photograph(30, 40), file_format, save_all=True, append_images=rest, **settings)


def png(width: int, height: int, depth: int, colour_type: int, rows: bytes = b"") -> bytes:
    """A PNG by hand, for what Pillow does not write; `rows` include their filter bytes."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    return PNG_SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def png16(values: np.ndarray) -> bytes:
    """H,W,C uint16 as a 16-bit PNG, gray or RGB."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(values.shape[1], values.shape[0], 16, 2 if values.shape[2] == 3 else 0, rows)


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def pixels(data: bytes) -> np.ndarray:
    """Decoded to H,W,3, after the promises about shape and dtype are checked."""
    image = decode(data, LIMIT)
    assert image.dtype == torch.uint8 and image.ndim == 3 and image.shape[0] == 3
    return image.permute(1, 2, 0).numpy()


def pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def kind_of(data: bytes, limit: int = LIMIT) -> str:
    with pytest.raises(BadImage) as caught:
        decode(data, limit)
    return caught.value.kind


RGB = photograph(60, 80)
JPEG = encoded(RGB, "JPEG", quality=90)
CMYK = encoded(Image.fromarray(photograph(60, 80, 4), "CMYK"), "JPEG")
SOF = JPEG.index(b"\xff\xc0")  # the frame header: marker, length, precision, height, width
YCCK = patched(CMYK, CMYK.index(b"Adobe") + ADOBE_TRANSFORM, b"\x02")
LOOKS_LIKE_PILLOW = {
    "jpeg": JPEG,
    "progressive jpeg": encoded(RGB, "JPEG", progressive=True),
    "gray jpeg": encoded(RGB[..., 0], "JPEG"),
    "cmyk jpeg": CMYK,
    "ycck jpeg": YCCK,
    "jpeg with bytes behind its end": JPEG + b"x" * 100,
    "png, whatever its name was": encoded(RGB, "PNG"),
    "gray png": encoded(RGB[..., 0], "PNG"),
    "1-bit png": encoded(Image.fromarray(RGB).convert("1"), "PNG"),
    "palette png": encoded(Image.fromarray(RGB).convert("P"), "PNG"),
    "palette png with a transparent colour": encoded(Image.fromarray(RGB).convert("P"), "PNG", transparency=3),
    "rgba png": encoded(photograph(60, 80, 4), "PNG"),
    "gray png with alpha": encoded(Image.fromarray(RGB[..., :2], "LA"), "PNG"),
    "webp": encoded(RGB, "WEBP"),
    "lossless webp": encoded(RGB, "WEBP", lossless=True),
    "rgba webp": encoded(photograph(60, 80, 4), "WEBP", lossless=True, exact=True),
    "gif": encoded(RGB, "GIF"),
    "gif with a transparent colour": encoded(Image.fromarray(RGB).convert("P"), "GIF", transparency=3),
    "avif": encoded(RGB, "AVIF"),
    "1x1 jpeg": encoded(photograph(1, 1), "JPEG"),
    "1x5000 png": encoded(photograph(5000, 1), "PNG"),
    "5000x1 jpeg": encoded(photograph(1, 5000), "JPEG"),
    "animated gif": frames("GIF"),
    "animated webp": frames("WEBP"),
    "animated avif": frames("AVIF"),
    "animated png": frames("PNG"),
    "mpo of a stereo camera": frames("MPO"),
}


@pytest.mark.parametrize("data", LOOKS_LIKE_PILLOW.values(), ids=LOOKS_LIKE_PILLOW)
def test_every_readable_kind_is_pillows_rgb_of_the_first_frame_to_the_bit(data):
    np.testing.assert_array_equal(pixels(data), pillow(data))


def test_alpha_is_dropped_and_the_stored_colour_stays():
    rgba = photograph(60, 80, 4)
    rgba[:20, :, 3] = 0  # fully transparent: the colour below is seen all the same
    np.testing.assert_array_equal(pixels(encoded(rgba, "PNG")), rgba[..., :3])
    webp = encoded(rgba, "WEBP", lossless=True, exact=True)
    np.testing.assert_array_equal(pixels(webp), rgba[..., :3])


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_png_is_rounded_to_8_bits(channels):
    values = np.random.default_rng(0).integers(0, 2**16, (20, 30, channels), dtype=np.uint16)
    expected = np.round(values / 257).astype(np.uint8)
    np.testing.assert_array_equal(pixels(png16(values)), np.broadcast_to(expected, (20, 30, 3)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "AVIF", "animated WEBP"])
def test_exif_orientation_is_applied(file_format, orientation):
    exif = Image.Exif()
    exif[0x112] = orientation
    animated, file_format = file_format.startswith("animated"), file_format.split()[-1]
    data = frames(file_format, exif=exif) if animated else encoded(photograph(30, 40), file_format, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    np.testing.assert_array_equal(pixels(data), np.asarray(upright))


def test_no_frame_but_the_first_is_decoded(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("torchcodec decodes, and allocates, every frame")

    monkeypatch.setattr(stage, "decode_image", refuse)
    for file_format in ("GIF", "WEBP", "AVIF"):
        assert pixels(frames(file_format)).shape == (30, 40, 3)
    assert kind_of(encoded(RGB, "WEBP")) == "corrupt"  # a still goes to the decoder that refuses here


BAD = {
    "no bytes": (b"", "empty"),
    "html": (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "not an image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    "text": (b"hello world\n" * 20, "not an image"),
    "zeros": (bytes(1000), "not an image"),
    "two bytes": (JPEG[:2], "not an image"),
    "tiff": (encoded(RGB, "TIFF"), "unsupported"),
    "bmp": (encoded(RGB, "BMP"), "unsupported"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(50), "unsupported"),
    "12-bit jpeg": (patched(JPEG, SOF + 4, b"\x0c"), "unsupported"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "truncated"),
    "half a jpeg filled up with zeros": (JPEG[: len(JPEG) // 2] + bytes(len(JPEG) // 2), "truncated"),
    "half a gray jpeg": (encoded(RGB[..., 0], "JPEG")[:600], "truncated"),
    "half a progressive jpeg": (LOOKS_LIKE_PILLOW["progressive jpeg"][:900], "truncated"),
    "half a png": (encoded(RGB, "PNG")[:5000], "truncated"),
    "a png's signature": (PNG_SIGNATURE, "truncated"),
    "a png without pixels": (png(80, 60, 8, 2), "truncated"),
    "half a webp": (encoded(RGB, "WEBP")[:300], "truncated"),
    "half a gif": (encoded(RGB, "GIF")[:3000], "truncated"),
    "half an animated webp": (frames("WEBP")[:500], "truncated"),
    "jpeg signature and zeros": (JPEG[:4] + bytes(300), "corrupt"),
    "png with a damaged chunk": (patched(encoded(RGB, "PNG"), 2000, bytes(40)), "corrupt"),
    "png of no width": (png(0, 10, 8, 2), "corrupt"),
    "webp of an unknown chunk": (patched(encoded(RGB, "WEBP"), 12, b"ABCD"), "corrupt"),
}


@pytest.mark.parametrize("data, kind", BAD.values(), ids=BAD)
def test_every_bad_file_is_named_by_its_kind(data, kind):
    assert kind in KINDS and kind_of(data) == kind


def test_a_jpeg_is_found_truncated_wherever_it_was_cut():
    for cut in range(4, len(JPEG), 13):
        assert kind_of(JPEG[:cut]) == "truncated", cut
    assert kind_of(JPEG[:-1]) == "truncated"


def webp_of(width: int, height: int) -> bytes:
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4)
    body += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(body)) + body


HUGE = {
    "png": png(60_000, 60_000, 8, 2),
    "png beyond every limit": png(2**31 - 1, 2**31 - 1, 8, 2),
    "jpeg": patched(JPEG, SOF + 5, struct.pack(">HH", 65_500, 65_500)),
    "gif": patched(encoded(RGB, "GIF"), 6, struct.pack("<HH", 65_535, 65_535)),
    "webp": webp_of(2**24, 2**24),
    "lossy webp": patched(encoded(RGB, "WEBP"), 26, struct.pack("<HH", 16_383, 16_383)),
    "lossless webp": patched(encoded(RGB, "WEBP", lossless=True), 21, struct.pack("<I", 2**28 - 1)),
}


@pytest.mark.filterwarnings("error")  # Pillow's own limit must not speak first
@pytest.mark.parametrize("data", HUGE.values(), ids=HUGE)
def test_a_huge_declared_size_is_refused_before_any_pixel_is_decoded(data, monkeypatch):
    def refuse(*_, **__):
        raise MemoryError("decoded before the size was checked")

    for name in ("decode_image", "decode_jpeg", "_first_frame"):
        monkeypatch.setattr(stage, name, refuse)
    assert kind_of(data, limit=100_000_000) == "too large"


def test_the_size_limit_is_the_last_size_that_passes():
    extended_webp = encoded(photograph(60, 80, 4), "WEBP")
    assert extended_webp[12:16] == b"VP8X"
    stills = [encoded(RGB, file_format) for file_format in ("PNG", "WEBP", "GIF", "AVIF")]
    for data in (JPEG, *stills, encoded(RGB, "WEBP", lossless=True), extended_webp):
        assert decode(data, 60 * 80).shape == (3, 60, 80)
        assert kind_of(data, limit=60 * 80 - 1) == "too large"


def test_running_out_of_memory_is_not_blamed_on_the_image(monkeypatch):
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(stage, "decode_jpeg", fail)
        with pytest.raises(type(error)):
            decode(JPEG, LIMIT)


def test_bytes_damaged_at_random_give_an_image_or_a_bad_image_and_nothing_else():
    rng = np.random.default_rng(0)
    outcomes = {"decoded": 0, **dict.fromkeys(KINDS, 0)}
    for data in (JPEG, CMYK, *(encoded(RGB, f) for f in ("PNG", "WEBP", "GIF")), frames("WEBP"), frames("AVIF")):
        for _ in range(40):
            damaged = bytearray(data)
            for at in rng.integers(0, min(len(data), 200 if rng.random() < 0.5 else len(data)), rng.integers(1, 8)):
                damaged[at] = rng.integers(256)
            try:
                pixels(bytes(damaged))
                outcomes["decoded"] += 1
            except BadImage as bad:
                outcomes[bad.kind] += 1
    assert outcomes["decoded"] > 20 and outcomes["corrupt"] > 20  # both did happen


def test_a_bad_image_survives_pickling_with_its_kind():
    bad = pickle.loads(pickle.dumps(BadImage("too large", "9x9 pixels")))
    assert (bad.kind, bad.message, str(bad)) == ("too large", "9x9 pixels", "too large: 9x9 pixels")


SIZES = [(375, 500), (500, 375), (28, 28), (3, 4), (1, 1), (1, 5000), (5000, 1), (90, 200), (200, 90)]


def torchvisions_box(height: int, width: int, uniforms: np.ndarray, scale: tuple[float, float], monkeypatch):
    """torchvision's own get_params, whose every random number is taken from `uniforms`."""
    tries, place = iter(uniforms[:-2]), iter(uniforms[-2:])

    class Drawn(float):
        def uniform_(self, low, high):
            return Drawn(low + (high - low) * next(tries))

        def item(self):
            return float(self)

    fake = SimpleNamespace(
        empty=lambda _: Drawn(),
        tensor=np.array,
        log=np.log,
        exp=lambda value: Drawn(math.exp(value)),
        randint=lambda low, high, size: torch.tensor(low + int(next(place) * (high - low))),
    )
    with monkeypatch.context() as patch:
        patch.setattr(torchvision_transforms, "torch", fake)
        image = torch.empty(1, device="meta").expand(3, height, width)
        return torchvision_transforms.RandomResizedCrop.get_params(image, list(scale), [3.0 / 4.0, 4.0 / 3.0])


@pytest.mark.parametrize("scale", [(0.2, 1.0), (0.9, 1.0), (1.0, 1.0)])
def test_crop_boxes_are_torchvisions_given_the_same_uniforms(scale, monkeypatch):
    rng = np.random.default_rng(1)
    for height, width in SIZES:
        for _ in range(40):
            uniforms = rng.random(CROP_DRAWS)
            box = crop_box(height, width, uniforms, scale)
            assert box == torchvisions_box(height, width, uniforms, scale, monkeypatch)


def test_every_box_lies_inside_the_image_and_is_not_empty():
    extremes = [
        np.zeros(CROP_DRAWS),
        np.full(CROP_DRAWS, 1 - 2.0**-53),
        *np.random.default_rng(2).random((50, CROP_DRAWS)),
    ]
    for height, width in SIZES:
        for uniforms in extremes:
            top, left, h, w = crop_box(height, width, uniforms, (0.2, 1.0))
            assert 0 <= top and 0 <= left and 0 < h and 0 < w and top + h <= height and left + w <= width


@pytest.mark.parametrize("height, width", [(375, 500), (28, 28), (40, 33), (90, 200)])
def test_two_crops_are_pils_antialiased_bilinear_within_1_of_255(height, width):
    augment = Augment(image_pixels=32)
    data = encoded(photograph(height, width), "PNG")
    for uniforms in np.random.default_rng(3).random((6, 2, CROP_DRAWS)):
        crops = two_crops(decode(data, LIMIT), uniforms, augment)
        assert crops.shape == (2, 32, 32, 3) and crops.dtype == np.uint8
        for crop, draws in zip(crops, uniforms, strict=True):
            top, left, h, w = crop_box(height, width, draws, augment.crop_scale)
            part = Image.open(io.BytesIO(data)).crop((left, top, left + w, top + h))
            reference = np.asarray(part.resize((32, 32), Image.Resampling.BILINEAR))
            assert np.abs(crop.astype(int) - reference).max() <= 1


def test_the_two_views_follow_their_own_uniforms_alone():
    image, augment = torch.from_numpy(photograph(60, 80)).permute(2, 0, 1), Augment(image_pixels=16)
    uniforms = np.random.default_rng(4).random((2, CROP_DRAWS))
    crops, swapped = two_crops(image, uniforms, augment), two_crops(image, uniforms[::-1], augment)
    np.testing.assert_array_equal(swapped, crops[::-1])
    assert (crops[0] != crops[1]).any()
    planar = two_crops(image.contiguous(), uniforms, augment)  # another memory format, same pixels
    np.testing.assert_array_equal(planar, crops)


@pytest.mark.parametrize("height, width", [(1, 1), (1, 5000), (5000, 1), (2, 3)])
def test_the_smallest_and_longest_images_give_crops_of_full_size(height, width):
    image = decode(encoded(photograph(height, width), "PNG"), LIMIT)
    crops = two_crops(image, np.random.default_rng(5).random((2, CROP_DRAWS)), Augment(image_pixels=32))
    assert crops.shape == (2, 32, 32, 3)
    assert centre_crop(image, 256, 224).shape == (224, 224, 3)


@pytest.mark.parametrize("height, width", [(375, 500), (500, 333), (28, 28), (33, 57)])
@pytest.mark.parametrize("resize, crop", [(36, 32), (32, 32), (61, 24)])
def test_centre_crop_is_torchvisions_resize_and_crop_on_pil_within_1_of_255(height, width, resize, crop):
    array = photograph(height, width)
    ours = centre_crop(torch.from_numpy(array).permute(2, 0, 1), resize, crop)
    reference = V.center_crop(V.resize(Image.fromarray(array), resize), crop)
    assert ours.flags["C_CONTIGUOUS"] and ours.dtype == np.uint8
    assert np.abs(ours.astype(int) - np.asarray(reference)).max() <= 1


@pytest.mark.parametrize("height, width", [(8, 400), (400, 8), (1, 300)])
def test_resizing_only_the_middle_of_a_long_image_changes_no_pixel_of_its_centre(height, width):
    image = torch.from_numpy(photograph(height, width)).permute(2, 0, 1)
    whole = V.center_crop(V.resize(image, 36, antialias=True), 32).permute(1, 2, 0)
    np.testing.assert_array_equal(centre_crop(image, 36, 32), whole)


def test_a_long_image_is_never_resized_to_more_than_16_squares(monkeypatch):
    resized, sizes = stage._resized, []
    monkeypatch.setattr(stage, "_resized", lambda image, *size: sizes.append(size) or resized(image, *size))
    for height, width in ((1, 5000), (5000, 1)):
        centre_crop(torch.zeros(3, height, width, dtype=torch.uint8), 64, 56)
    assert sizes == [(64, 1024), (1024, 64)]


def test_a_centre_crop_larger_than_the_resized_image_is_refused():
    with pytest.raises(ValueError, match="evaluation.resize_pixels"):
        centre_crop(torch.zeros(3, 50, 50, dtype=torch.uint8), 32, 48)


@pytest.mark.parametrize("height,width", [(500, 375), (40, 60), (3, 7), (1, 1), (64, 64)])
def test_two_crops_are_what_interpolate_gives_to_the_bit(height, width):
    """The operator is called without its public door, for that has no `out`."""
    image = torch.from_numpy(np.random.default_rng(height).integers(0, 256, (3, height, width), np.uint8))
    draws = np.random.default_rng(1).random((2, CROP_DRAWS))
    augment = Augment(image_pixels=48)
    into = np.empty((2, 48, 48, 3), np.uint8)
    assert two_crops(image, draws, augment, into) is into
    for crop, uniforms in zip(into, draws, strict=True):
        top, left, h, w = crop_box(height, width, uniforms, augment.crop_scale)
        part = image[None, :, top : top + h, left : left + w].contiguous(memory_format=torch.channels_last)
        expected = torch.nn.functional.interpolate(part, size=(48, 48), mode="bilinear", antialias=True)
        assert torch.equal(torch.from_numpy(crop), expected[0].permute(1, 2, 0))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 5}, {"subsampling": 0}, {"comment": b"x" * 900}])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_the_quick_look_at_a_jpeg_header_agrees_with_pillow(mode, options):
    encoded = io.BytesIO()
    Image.new(mode, (37, 21)).save(encoded, "jpeg", **options)
    quick = stage._jpeg_header(encoded.getvalue())
    assert quick == (37, 21, False)
    with Image.open(io.BytesIO(encoded.getvalue())) as image:
        assert image.size == quick[:2]
    for length in range(len(encoded.getvalue())):  # cut anywhere: Pillow is asked, or the same is said
        assert stage._jpeg_header(encoded.getvalue()[:length]) in (None, quick)
