"""Which images training sees: every one once an epoch, whatever the layout, the world size and the step of a resume.

No Ray: what the tasks of all ranks yield, in turn. Each image is of one colour that is its number, so that crops tell
which it is without asking the code which row it read.
"""

import io
import json
import tarfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from moco_ray import plan as plan_module
from moco_ray.data import segment as segment_module
from moco_ray.data import tars
from moco_ray.data.batch import BadRow
from moco_ray.data.order import EpochOrder
from moco_ray.data.reading import reading
from moco_ray.data.segment import Segments, Source, segment_steps
from moco_ray.data.storage import Store
from moco_ray.data.survey import build_manifest
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe

ROWS, BATCH, GROUP, EPOCHS = 311, 32, 4, 3  # 9 steps an epoch in windows of 4, 4 and 1; 23 rows are left out of each
STEPS = ROWS // BATCH
PARTS = {
    "unequal shards": [1, 190, 2, 1, 77, 40],
    "unequal tars": [3, 150, 61, 97],
    "fewer chunks than groups": [200, 111],
}
LAYOUTS = (*PARTS, "tree")
BAD = {5: b"", 60: b"<html>", 61: b"\xff\xd8\xff", 250: b"hello"}


@lru_cache(maxsize=ROWS)
def picture(number: int) -> bytes:
    """A PNG whose every pixel is its number."""
    pixels = np.full((9, 11, 3), divmod(number, 256) + (7,), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "png", compress_level=1)
    return encoded.getvalue()


def numbers_of(crops: np.ndarray) -> np.ndarray:
    """(N,) the numbers of the images that crops N,2,P,P,3 are of."""
    flat = crops.reshape(len(crops), -1, 3).astype(int)
    assert (flat == flat[:, :1]).all() and (flat[..., 2] == 7).all(), "both views are of one image"
    return flat[:, 0, 0] * 256 + flat[:, 0, 1]


def write_data(root: Path, layout: str, images: list[bytes]) -> None:
    """Images in the order of their rows in the manifest."""
    root.mkdir()
    if layout == "tree":
        for number, content in enumerate(images):
            path = root / f"class {number // 100}" / f"{number:04}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        return
    first = 0
    for part, rows in enumerate(PARTS[layout]):
        some = images[first : first + rows]
        first += rows
        if layout == "unequal tars":
            with tarfile.open(root / f"{part}.tar", "w") as archive:
                for number, content in enumerate(some):
                    member = tarfile.TarInfo(f"{number:04}.png")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        else:
            group = 500 if layout == "fewer chunks than groups" else 16
            pq.write_table(pa.table({"image": some}), root / f"{part}.parquet", row_group_size=group)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder for each layout, and for each with damaged images in the rows BAD."""
    root = tmp_path_factory.mktemp("data")
    images = [picture(number) for number in range(ROWS)]
    for layout in LAYOUTS:
        write_data(root / layout, layout, images)
        write_data(root / f"damaged {layout}", layout, [BAD.get(number, images[number]) for number in range(ROWS)])
    return root


@pytest.fixture
def folders(written, monkeypatch):
    """Windows of 4 steps, and tasks of two windows of one rank, so that a small data set has several."""
    monkeypatch.setattr(plan_module, "WINDOW_ROWS", 16)
    monkeypatch.setattr(segment_module, "MOST_TASK_ROWS", 256)
    monkeypatch.setattr(tars, "CHUNK_ROWS", 16)
    return written


def source_of(folder: Path, seed: int = 3) -> Source:
    recipe = Recipe.parse({"schedule": {"epochs": EPOCHS}, "augment": {"image_pixels": 8}, "run": {"seed": seed},
                           "batch": {"global_batch_size": BATCH, "bn_group_size": GROUP}})  # fmt: skip
    manifest = build_manifest(str(folder), "image")
    return Source(manifest, recipe, Plan(recipe, manifest.rows))


def run_of(source: Source, world: int, start: int = 0) -> list[dict[str, np.ndarray]]:
    """The steps of a run from `start` on: what all ranks' tasks yield, put together as one batch a step."""
    ranks = []
    for rank in range(world):
        segments = Segments(source.plan, world, rank, start)
        each = (segment_steps(source, segments.groups, segments[index]) for index in range(len(segments)))
        ranks.append([step for steps in each for step in steps])
    return [
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*ranks, strict=True)
    ]


@lru_cache(maxsize=16)
def reference(source: Source) -> list[dict[str, np.ndarray]]:
    return run_of(source, 1)


def assert_equal_runs(one: list[dict], other: list[dict]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name])


def epochs(run: list[dict]) -> list[np.ndarray]:
    """For each epoch the numbers of its images, S,B."""
    seen = np.stack([numbers_of(step["crops"]) for step in run])
    return list(seen.reshape(EPOCHS, STEPS, BATCH))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_epoch_shows_every_image_once_but_for_R_mod_B(folders, layout):
    source = source_of(folders / layout)
    assert source.plan.window_steps == 4 and len(Segments(source.plan, 1, 0, 0)) == 2 * EPOCHS
    assert (len(source.manifest.chunk_rows) < source.plan.groups) == (layout == "fewer chunks than groups")
    run = reference(source)
    for index, step in enumerate(run):
        epoch, inner = divmod(index, STEPS)
        assert (step["step"] == index).all() and (step["bad"] == "").all()
        assert step["position"].tolist() == list(range(inner * BATCH, (inner + 1) * BATCH))
        np.testing.assert_array_equal(
            step["row"], numbers_of(step["crops"]), "the row that is told is the one that is shown"
        )
    left_out = []
    for seen in epochs(run):
        assert len(set(seen.ravel().tolist())) == seen.size == ROWS - ROWS % BATCH
        left_out.append(frozenset(range(ROWS)) - set(seen.ravel().tolist()))
    chunks = len(
        source.manifest.chunk_rows
    )  # those left out are the last of a chunk, so two chunks have but two such sets
    assert len(set(left_out)) >= min(EPOCHS, chunks), "others every epoch"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_world_size_shows_the_same_images_in_the_same_steps_and_crops(folders, layout, world):
    source = source_of(folders / f"damaged {layout}")
    assert_equal_runs(run_of(source, world), reference(source))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_seed_and_another_epoch_have_another_order(folders, layout):
    first, second = (
        epochs(reference(source_of(folders / layout))),
        epochs(reference(source_of(folders / layout, seed=4))),
    )
    for one, other in ((first[0], first[1]), (first[1], first[2]), (first[0], second[0])):
        assert (one == other).mean() < 0.1  # in a few chunks a row keeps its step by chance
        assert sorted(one[0]) != sorted(other[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_image_is_replaced_by_another_and_every_other_is_still_shown_once(folders, layout):
    """Replacements are counted apart: they are a second turn of an image."""
    good, run = reference(source_of(folders / layout)), reference(source_of(folders / f"damaged {layout}"))
    for epoch in range(EPOCHS):
        steps = slice(epoch * STEPS, (epoch + 1) * STEPS)
        rows, shown, bad = (np.concatenate([step[n] for step in run[steps]]) for n in ("row", "crops", "bad"))
        wanted = np.concatenate([step["row"] for step in good[steps]])
        shown, hurt = numbers_of(shown), bad != ""
        np.testing.assert_array_equal(rows, shown)
        np.testing.assert_array_equal(shown[~hurt], wanted[~hurt])
        listed = [BadRow(*json.loads(text)) for text in bad[hurt]]
        assert [one.row for one in listed] == wanted[hurt].tolist()
        assert set(wanted[hurt].tolist()) == set(BAD) & set(wanted.tolist()), "each in its own turn"
        assert not set(shown.tolist()) & set(BAD)
    assert any((step["bad"] != "").any() for step in run)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "world, starts", [(1, (6, 2 * STEPS + 4)), (3, (1, STEPS - 1, STEPS)), (4, (STEPS + 6, 3 * STEPS - 1))]
)
def test_a_resume_at_any_step_shows_exactly_the_rest(folders, layout, world, starts):
    """In the middle of a window, at its seam, at an epoch's, and in the last step: also where images are replaced."""
    source = source_of(folders / f"damaged {layout}")
    for start in starts:
        assert_equal_runs(run_of(source, world, start), reference(source)[start:])
    assert run_of(source, world, EPOCHS * STEPS) == []


# How well an order mixes: arithmetic alone, on chunks as `moco-ray pack` writes them


@pytest.fixture(scope="module")
def packed():
    """40,960 rows in chunks of 128, batches of 256 in 8 groups: (plan, the order of an epoch)."""
    recipe = Recipe.parse({"schedule": {"epochs": 1}, "batch": {"global_batch_size": 256, "bn_group_size": 32}})
    plan = Plan(recipe, 320 * 128)
    return plan, EpochOrder(np.full(320, 128), plan, 0, 0)


def test_neighbours_of_a_chunk_lie_a_third_of_a_window_apart(packed):
    """Two rows of a window of w steps, at any two of its w*n places alike: the mean of |s - t| over their steps s, t.

    Two independent uniform steps lie (w*w - 1) / (3*w) apart. The second row has a place less in the first one's step,
    so all differences but 0 are more frequent by w*n / (w*n - 1).
    """
    plan, order = packed
    w, n = plan.window_steps, 32
    expected = (w * w - 1) / (3 * w) * (w * n) / (w * n - 1)
    slow = np.abs(np.subtract.outer(np.arange(w * n) // n, np.arange(w * n) // n))
    assert w == 16 and expected == pytest.approx(slow.sum() / (w * n * (w * n - 1)), rel=1e-12)
    step_of, stream_of = np.full(plan.rows, -1), np.full(plan.rows, -1)
    for step in range(plan.steps_per_epoch):
        for group in range(plan.groups):
            rows = order.rows_of(step, group)
            step_of[rows], stream_of[rows] = step, group * order.windows + order.window_of(step)
    one = np.flatnonzero((np.arange(plan.rows - 1) % 128 != 127) & (stream_of[1:] == stream_of[:-1]))
    distance = np.abs(np.diff(step_of))[one]
    error = distance.std() / np.sqrt(len(distance))  # neighbours share rows: a little more than that
    assert len(one) > 0.99 * plan.rows * 127 / 128 and abs(distance.mean() - expected) < 5 * error < 0.1
    assert (distance == 0).mean() == pytest.approx((n - 1) / (w * n - 1), rel=0.1), (
        "in the same batch norm group, together"
    )


def test_a_group_sees_all_chunks_of_its_window_in_every_step(packed):
    """4 chunks of 128 rows make a window of 512; each is missing from 32 rows with C(384,32) / C(512,32)."""
    plan, order = packed
    missing = np.prod((384 - np.arange(32)) / (512 - np.arange(32)))
    steps, groups = range(plan.steps_per_epoch), range(plan.groups)
    seen = np.array([[len(set(order.rows_of(step, group) // 128)) for group in groups] for step in steps])
    assert seen.mean() == pytest.approx(4 * (1 - missing), abs=0.003) and seen.min() >= 3
    assert np.mean(seen.sum(1)) > 31.9, "32 in a batch"


# What it costs to read


class Counting(io.FileIO):
    """A file that counts what is read from it."""

    read_bytes = 0

    def read(self, size: int = -1) -> bytes:
        found = super().read(size)
        Counting.read_bytes += len(found)
        return found


@pytest.mark.parametrize("world", [1, 3])
def test_an_epoch_of_packed_shards_reads_little_more_than_its_images(tmp_path, monkeypatch, world):
    """A window of 512 rows cuts a row group of 128 at each end, and reads up to 639 / 512 of it; footers on top."""
    monkeypatch.setattr(segment_module, "decode", lambda *_: torch.zeros(3, 8, 8, dtype=torch.uint8))
    rows, size, rng = 48 * 256 + 100, 4000, np.random.default_rng(0)
    for shard, first in enumerate(range(0, rows, 1500)):
        images = [rng.bytes(size) for _ in range(min(1500, rows - first))]
        settings = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        pq.write_table(pa.table({"image": images}), tmp_path / f"{shard}.parquet", row_group_size=128, **settings)
    recipe = Recipe.parse({"schedule": {"epochs": 1}, "augment": {"image_pixels": 8},
                           "batch": {"global_batch_size": 256, "bn_group_size": 32}})  # fmt: skip
    manifest = build_manifest(str(tmp_path), "image")
    source = Source(manifest, recipe, Plan(recipe, rows))
    monkeypatch.setattr(Store, "open", lambda store, name: pa.PythonFile(Counting(Path(store.uri, name)), mode="r"))
    monkeypatch.setattr(Counting, "read_bytes", 0)
    used = sum(len(step["row"]) * size for step in run_of(source, world))
    assert used == 48 * 256 * size
    assert 1.0 < Counting.read_bytes / used < 1.3
    assert Counting.read_bytes / used == pytest.approx(reading(manifest, source.plan, world).amplification, abs=0.05)
