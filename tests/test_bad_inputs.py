"""Whatever people have in their folders, as files of a data set: it is shown, or it is counted by kind and replaced.

What the decoder makes of each kind to the pixel is in test_decode.py; here they lie in a tree, in shards and in tars,
among enough plain images, and go the way of training.
"""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from moco_ray.data import decode as stage
from moco_ray.data.batch import BadRow
from moco_ray.data.decode import decode
from moco_ray.data.segment import Segments, Source, segment_steps
from moco_ray.data.shards import read_chunk_rows
from moco_ray.data.survey import build_manifest
from moco_ray.errors import UserError
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe
from tests.test_decode import CMYK, JPEG, RGB, YCCK, encoded, frames, photograph, png, png16

ROTATED = Image.Exif()
ROTATED[0x112] = 6
HUGE = png(12_000, 12_000, 1, 0, bytes(12_000 * 1501))  # whole and right: 22 kB that would become 432 MB
GOOD = {
    "cmyk.jpg": CMYK,
    "ycck.jpg": YCCK,
    "gray.JPG": encoded(RGB[..., 0], "JPEG"),
    "alpha.png": encoded(photograph(60, 80, 4), "PNG"),
    "palette.png": encoded(Image.fromarray(RGB).convert("P"), "PNG", transparency=3),
    "16 bit.png": png16(np.random.default_rng(0).integers(0, 2**16, (20, 30, 3), dtype=np.uint16)),
    "1x1.png": encoded(photograph(1, 1), "PNG"),
    "1x5000.jpeg": encoded(photograph(5000, 1), "JPEG"),
    "rotated.jpg": encoded(photograph(30, 40), "JPEG", exif=ROTATED),
    "a png in truth.jpg": encoded(RGB, "PNG"),
    "a jpeg in truth.webp": JPEG,
    "animated.gif": frames("GIF"),
    "animated.webp": frames("WEBP"),
    "schöne Blüten 雪 (1).jpg": JPEG,
}
BAD = {
    "half.jpg": (JPEG[: len(JPEG) // 2], "truncated"),
    "half.png": (encoded(RGB, "PNG")[:5000], "truncated"),
    "12000x12000.png": (HUGE, "too large"),
    "nothing.jpg": (b"", "empty"),
    "page.jpg": (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "not an image"),
    "text.png": (b"hello world\n" * 20, "not an image"),
    "scan.tif": (encoded(RGB, "TIFF"), "unsupported"),
    "leer ü.bmp": (encoded(RGB, "BMP"), "unsupported"),
}
PLAIN = {f"plain {number:02}.jpg": encoded(photograph(24, 32, seed=number), "JPEG") for number in range(42)}
FILES = dict(sorted((GOOD | {name: content for name, (content, _) in BAD.items()} | PLAIN).items()))  # 64


def write_tree(root: Path) -> None:
    for number, (name, content) in enumerate(FILES.items()):
        folder = root / f"Klasse {'ßä'[number // 32]}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (root / "an empty class").mkdir()


def write_parquet(root: Path) -> None:
    """Of bytes, and of the Hugging Face struct; what is empty is a null here."""
    root.mkdir()
    images = [content or None for content in FILES.values()]
    pq.write_table(pa.table({"image": images[:30]}), root / "0.parquet", row_group_size=7)
    structs = [{"bytes": content, "path": "x"} if content else None for content in images[30:]]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    pq.write_table(pa.table({"image": pa.array(structs, kind)}), root / "1.parquet", row_group_size=7)


def write_tars(root: Path) -> None:
    root.mkdir()
    for part, some in enumerate((list(FILES.items())[:25], list(FILES.items())[25:])):
        with tarfile.open(root / f"{part}.tar", "w") as archive:
            for name, content in some:
                member = tarfile.TarInfo(f"Bilder ü/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


WRITE = {"tree": write_tree, "parquet": write_parquet, "tar": write_tars}


@pytest.fixture(scope="module", params=WRITE)
def source(request, tmp_path_factory) -> Source:
    root = tmp_path_factory.mktemp("data") / "with spaces ü#1"
    WRITE[request.param](root)
    recipe = Recipe.parse({"schedule": {"epochs": 1}, "augment": {"image_pixels": 8},
                           "batch": {"global_batch_size": 32, "bn_group_size": 8}})  # fmt: skip
    manifest = build_manifest(str(root), "image")
    assert manifest.layout == request.param and manifest.rows == 64 and manifest.warnings == ()
    return Source(manifest, recipe, Plan(recipe, manifest.rows))


def test_every_kind_of_file_is_shown_or_counted_by_kind_and_replaced(source):
    segments = Segments(source.plan, 1, 0, 0)
    steps = list(segment_steps(source, segments.groups, segments[0]))
    assert len(steps) == 2 and len(segments) == 1
    rows, texts, position = (np.concatenate([step[name] for step in steps]) for name in ("row", "bad", "position"))
    bad = [BadRow(*json.loads(text)) for text in texts if text]
    assert Counter(one.kind for one in bad) == Counter(kind for _, kind in BAD.values())
    names = list(FILES)
    assert {names[one.row]: one.kind for one in bad} == {name: kind for name, (_, kind) in BAD.items()}
    assert sorted(rows[texts == ""].tolist()) == [row for row, name in enumerate(names) if name not in BAD]
    for one in bad:
        (place,) = np.flatnonzero(position == one.position)
        assert names[rows[place]] not in BAD and one.source == source.manifest.source(one.row) and one.message
        group = one.position % 32 // 8
        assert rows[place] in source.order(0).window_rows(group, 0), "its stand-in is of the same group's window"
    (large,) = [one for one in bad if one.kind == "too large"]
    assert large.message == "12000x12000 pixels; data.max_image_pixels is 100000000"


def test_crops_are_of_the_images_that_are_told(source):
    """An image of 1x1 has crops of its one colour; every other crop lies within the colours of its image."""
    segments, names = Segments(source.plan, 1, 0, 0), list(FILES)
    for step in segment_steps(source, segments.groups, segments[0]):
        assert step["crops"].shape == (32, 2, 8, 8, 3) and step["crops"].dtype == np.uint8
        for row, crops in zip(step["row"].tolist(), step["crops"].astype(int), strict=True):
            pixels = decode(FILES[names[row]], 10**8).flatten(1).numpy()
            assert (crops >= pixels.min(1)).all() and (crops <= pixels.max(1)).all()


def test_no_decoder_sees_an_image_beyond_the_limit(source, monkeypatch):
    seen = []
    for name in ("decode_image", "decode_jpeg", "_first_frame"):
        keep = getattr(stage, name)
        monkeypatch.setattr(stage, name, lambda data, keep=keep, **how: seen.append(len(data)) or keep(data, **how))
    segments = Segments(source.plan, 1, 0, 0)
    list(segment_steps(source, segments.groups, segments[0]))
    assert len(seen) > 50 and len(HUGE) not in seen


def test_the_names_of_bad_files_lead_people_to_them(source):
    where = {"tree": ["Klasse ß/12000x12000.png", "Klasse ä/text.png"], "parquet": ["0.parquet row group 0 row 0"],
             "tar": ["0.tar part 0 row 0"]}[source.manifest.layout]  # fmt: skip
    assert set(where) <= {source.manifest.source(row) for row, name in enumerate(FILES) if name in BAD}


def test_an_empty_class_folder_is_no_class(tmp_path):
    write_tree(tmp_path / "tree")
    assert build_manifest(str(tmp_path / "tree")).classes == ("Klasse ß", "Klasse ä")


def test_an_image_column_of_another_name_is_refused_with_the_columns_there_are(tmp_path):
    pq.write_table(pa.table({"jpg": [JPEG], "cls": [1]}), tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match="a.parquet has no column 'image'; name one of jpg, cls as data.image_column"
    ) as caught:
        build_manifest(str(tmp_path), "image")
    assert "\n" not in str(caught.value)
    assert build_manifest(str(tmp_path), "jpg").rows == 1


def test_a_shard_of_nulls_alone_has_rows_and_no_image(tmp_path):
    pq.write_table(pa.table({"image": pa.array([None] * 5, pa.binary())}), tmp_path / "a.parquet")
    manifest = build_manifest(str(tmp_path), "image")
    assert manifest.rows == 5 and read_chunk_rows(manifest, 0, np.arange(5)).encoded == [b""] * 5
