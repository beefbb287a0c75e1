"""Packing: every layout to shuffled Parquet shards, interrupted and gone on, against what was put in.

Most tests run the tasks in this process, in an order of their own; some on a local Ray, and that both write the same
bytes is one of the claims.
"""

import hashlib
import io
import json
import re
import shutil
import tarfile
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from PIL import Image

from moco_ray.data import pack as packing
from moco_ray.data import pack_passes
from moco_ray.data import slices as slices_module
from moco_ray.data.decode import decode
from moco_ray.data.listing import find_data
from moco_ray.data.pack import PackOptions, pack, summary
from moco_ray.data.reencode import is_progressive
from moco_ray.data.shards import read_chunk_rows
from moco_ray.data.slices import Parts, joined
from moco_ray.data.storage import Store
from moco_ray.data.survey import build_manifest, index_manifest
from moco_ray.errors import UserError

ROWS = 600
SMALL = {"shard_bytes": 40_000, "task_bytes": 30_000, "bucket_rows": 250}  # 7 shards, some ten tasks, 3 buckets
BAD = {40: b"", 41: b"no image at all", 500: b"\x89PNG\r\n\x1a\n"}


def picture(number: int, file_format: str = "png", side: int = 10, **settings) -> bytes:
    """An image, different for every number."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side + 2, 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, file_format, **settings)
    return encoded.getvalue()


IMAGES = [picture(number) for number in range(ROWS)]


def write_parquet(folder: Path, images: list[bytes], labels: list | None, group=30, shard=240, **more: list) -> Path:
    folder.mkdir(parents=True)
    for first in range(0, len(images), shard):
        part = slice(first, first + shard)
        columns = {"image": images[part]} | ({} if labels is None else {"label": labels[part]})
        table = pa.table(columns | {name: values[part] for name, values in more.items()})
        pq.write_table(table, folder / f"{first:05}.parquet", row_group_size=group)
    return folder


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> Path:
    """The same images as `parquet`, `tar` and `tree`, sorted by class (number // 60), some of them damaged."""
    root = tmp_path_factory.mktemp("sources")
    images, labels = [BAD.get(number, image) for number, image in enumerate(IMAGES)], [n // 60 for n in range(ROWS)]
    write_parquet(root / "parquet", images, labels)
    (root / "tar").mkdir()
    for first in range(0, ROWS, 200):
        with tarfile.open(root / "tar" / f"{first}.tar", "w") as archive:
            for number in range(first, first + 200):
                members = {"png": images[number]} | ({"cls": str(labels[number]).encode()} if number % 7 else {})
                for suffix, content in members.items():
                    info = tarfile.TarInfo(f"{number:04}.{suffix}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    for number, image in enumerate(images):
        path = root / "tree" / f"class{labels[number]}" / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    return root


@pytest.fixture(scope="module")  # stopped before the next file starts its own
def cluster():
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: it holds sockets
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, object_store_memory=100 << 20, log_to_driver=False)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


class Killed(Exception):
    """Stands for the end of the driver."""


class Here:
    """Runs tasks in this process, from the last to the first; may be killed after some of them."""

    def __init__(self):
        self.ran, self.last = [], None

    def __call__(self, job, work, numbers):
        for number in reversed(numbers):
            if self.last is not None and len(self.ran) >= self.last:
                raise Killed
            self.ran.append((work.func.__name__, number))
            yield number, json.loads(json.dumps(work(number)))


@pytest.fixture
def here(monkeypatch) -> Here:
    runner = Here()
    monkeypatch.setattr(packing, "_tasks", runner)
    return runner


def packed(source: Path, target: Path, **options) -> dict:
    return pack(str(source), str(target), PackOptions(**{**SMALL, **options}), io.StringIO())


def files(target: Path) -> dict[str, bytes]:
    return {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}


def digest(target: Path) -> dict[str, str]:
    """Everything that packing wrote, but for the addresses in it."""
    found = files(target)
    del found["_moco_ray/manifest.parquet"]  # its address is part of it; its fingerprint is compared elsewhere
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def table_of(target: Path) -> pa.Table:
    """The packed rows in the order of the target."""
    return pa.concat_tables(pq.read_table(path) for path in sorted(target.glob("*.parquet")))


GOOD = [number for number in range(ROWS) if number not in BAD]


@pytest.mark.parametrize("layout", ["parquet", "tar", "tree"])
def test_the_packed_rows_are_the_good_rows_of_the_source_with_their_labels(sources, tmp_path, here, layout):
    facts = packed(sources / layout, tmp_path / "out")
    table = table_of(tmp_path / "out")
    by_image = {image: number for number, image in enumerate(IMAGES)}
    numbers = [by_image[image] for image in table["image"].to_pylist()]
    assert sorted(numbers) == GOOD
    missing = {number for number in GOOD if layout == "tar" and number % 7 == 0}  # samples without .cls
    assert table["label"].to_pylist() == [None if n in missing else n // 60 for n in numbers]
    ids = {"parquet": lambda n: f"{n // 240 * 240:05}.parquet row group {n % 240 // 30} row {n % 30}",
           "tar": lambda n: f"{n:04}", "tree": lambda n: f"class{n // 60}/{n:04}.png"}  # fmt: skip
    assert table["id"].to_pylist() == [ids[layout](n) for n in numbers]
    assert facts["rows"] == len(GOOD) and facts["rows_in"] == ROWS and facts["labelled"] == len(GOOD) - len(missing)
    assert facts["classes"] == ([f"class{c}" for c in range(10)] if layout == "tree" else [])
    about = json.loads(pq.read_schema(tmp_path / "out" / "part-00000.parquet").metadata[b"moco_ray_pack"])
    assert about["classes"] == facts["classes"]


def test_bad_rows_are_counted_by_kind_and_listed_with_their_source(sources, tmp_path, here, monkeypatch):
    facts = packed(sources / "parquet", tmp_path / "out")
    assert facts["bad"] == {"empty": 1, "not an image": 1, "truncated": 1}
    bad = [json.loads(line) for line in (tmp_path / "out/_moco_ray/bad_rows.jsonl").read_text().splitlines()]
    assert [(one["row"], one["kind"]) for one in bad] == [(40, "empty"), (41, "not an image"), (500, "truncated")]
    assert bad[2]["source"] == "00480.parquet row group 0 row 20" and bad[1]["message"].startswith("15 bytes")
    monkeypatch.setattr(packing, "BAD_ROWS_LISTED", 2)
    facts = packed(sources / "parquet", tmp_path / "short")
    assert sum(facts["bad"].values()) == 3 and "the first listed in" in summary(facts, "x")
    assert len((tmp_path / "short/_moco_ray/bad_rows.jsonl").read_text().splitlines()) == 2


def order_of(target: Path) -> np.ndarray:
    by_image = {image: number for number, image in enumerate(IMAGES)}
    return np.array([by_image[image] for image in table_of(target)["image"].to_pylist()])


def test_the_order_is_the_permutation_by_the_rows_own_uniforms(sources, tmp_path, here):
    orders = {}
    for seed in (0, 1):
        packed(sources / "parquet", tmp_path / str(seed), seed=seed)
        orders[seed] = order_of(tmp_path / str(seed))
        keys = pack_passes.uniforms(seed, 0, np.arange(ROWS), 0, pack_passes.PACK, 1)[:, 0]
        assert orders[seed].tolist() == sorted(GOOD, key=lambda row: keys[row])
    assert (orders[0] == orders[1]).mean() < 0.05


def test_a_class_sorted_source_is_spread_over_all_shards_and_row_groups(sources, tmp_path, here):
    assert any("sorted by class" in text for text in build_manifest(str(sources / "parquet")).warnings)
    packed(sources / "parquet", tmp_path / "out", shard_bytes=80_000)
    shards = sorted((tmp_path / "out").glob("*.parquet"))
    assert len(shards) == 4
    spread = np.array([np.bincount(pq.read_table(path)["label"], minlength=10) for path in shards])  # shards, classes
    expected = spread.sum(0) / len(shards)  # 15 of a class in a shard: binomial, standard deviation 3.4
    assert (np.abs(spread - expected) < 4 * np.sqrt(expected)).all() and spread.min() > 0
    assert build_manifest(str(tmp_path / "out")).warnings == ()
    order = order_of(tmp_path / "out")
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.15  # 3.7 standard deviations of no order at all


def test_a_packed_set_is_read_by_the_manifest_that_its_footers_would_give(sources, tmp_path, here):
    facts = packed(sources / "tree", tmp_path / "out")
    manifest, store = build_manifest(str(tmp_path / "out")), Store.at(str(tmp_path / "out"))
    fresh = index_manifest(store, find_data(store), "image")
    assert (manifest.fingerprint, manifest.rows) == (fresh.fingerprint, len(GOOD))
    assert manifest.chunk_rows.max() <= 128
    rows = read_chunk_rows(manifest, 1, np.array([3, 0]), "label")
    assert rows.labels.tolist() == pq.ParquetFile(tmp_path / "out" / manifest.name(1)).read_row_group(
        int(manifest.part[1]))["label"].take([3, 0]).to_pylist()  # fmt: skip
    for name, shard in facts["shards"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert shard["bytes"] == len(content) and shard["sha256"] == hashlib.sha256(content).hexdigest()
        column = pq.ParquetFile(io.BytesIO(content)).metadata.row_group(0).column(0)
        assert column.compression == "UNCOMPRESSED" and not column.has_dictionary_page
    assert sum(shard["rows"] for shard in facts["shards"].values()) == facts["rows"]


def test_ray_writes_the_same_bytes_as_this_process_and_says_how_far_it_is(cluster, sources, tmp_path, monkeypatch):
    monkeypatch.setattr("moco_ray.stages.BRIEF_SECONDS", 0.0)
    out = io.StringIO()
    facts = pack(str(sources / "parquet"), str(tmp_path / "ray"), PackOptions(**SMALL, drop_duplicates=True), out)
    assert facts["rows"] == len(GOOD) and not facts["already_there"]
    ends = re.findall(r"^(.+): (\d+) of \2 tasks, 0:\d\d$", out.getvalue(), re.M)
    assert [what for what, _ in ends] == ["reading", "comparing", "writing shards"]
    assert [int(count) for _, count in ends][1:] == [3, 7] and int(ends[0][1]) > 3
    monkeypatch.setattr(packing, "_tasks", Here())
    packed(sources / "parquet", tmp_path / "here", drop_duplicates=True)
    assert digest(tmp_path / "ray") == digest(tmp_path / "here")


def test_a_users_mistake_in_a_task_arrives_as_one_line_and_the_run_goes_on_afterwards(cluster, sources, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(sources / "parquet", source)
    kept = (source / "00240.parquet").read_bytes()
    job = pack_passes.plan(build_manifest(str(source)), Store.at(str(target)), PackOptions(**SMALL))
    work = partial(pack_passes.scatter, job)
    (source / "00240.parquet").unlink()
    with pytest.raises(UserError, match="source/00240.parquet cannot be read") as caught:
        list(packing._tasks(job, work, list(range(len(job.cuts) - 1))))
    assert "\n" not in str(caught.value)
    (source / "00240.parquet").write_bytes(kept)
    other = replace(job, identity={**job.identity, "versions": {"pyarrow": "1.0"}})
    with pytest.raises(UserError, match="a machine of the cluster has .*; give all the same environment"):
        list(packing._tasks(other, work, [0]))
    shutil.rmtree(target)
    assert packed(source, target)["rows"] == len(GOOD)


def test_storage_behind_a_uri_holds_the_same_bytes_as_a_disk(sources, tmp_path, here):
    """fsspec's memory: as object storage, it has no renames and no folders."""
    packed(sources / "parquet", tmp_path / "disk")
    expected = digest(tmp_path / "disk")
    store = Store.at("memory://packed/here")
    here.last = 2 * len(here.ran) - 2
    with pytest.raises(Killed):
        pack(str(sources / "parquet"), store.uri, PackOptions(**SMALL), io.StringIO())
    here.last = None
    pack(str(sources / "parquet"), store.uri, PackOptions(**SMALL), io.StringIO())
    names = [entry.name for entry in store.list() if entry.name != "_moco_ray/manifest.parquet"]
    assert {name: hashlib.sha256(store.read(name)).hexdigest() for name in names} == expected
    assert build_manifest(store.uri).rows == len(GOOD)


def test_killed_after_any_task_it_goes_on_and_ends_with_the_same_bytes(sources, tmp_path, monkeypatch, here):
    packed(sources / "parquet", tmp_path / "whole", drop_duplicates=True)
    whole, tasks = digest(tmp_path / "whole"), list(here.ran)
    assert len(tasks) == len(set(tasks)) > 15
    for last in (0, 1, 5, len(tasks) - 7, len(tasks) - 6, len(tasks) - 1):
        target, first, second = tmp_path / str(last), Here(), Here()
        first.last = last
        monkeypatch.setattr(packing, "_tasks", first)
        with pytest.raises(Killed):
            packed(sources / "parquet", target, drop_duplicates=True)
        with pytest.raises(UserError, match="run the same `moco-ray pack` again"):
            build_manifest(str(target))  # visibly not complete
        monkeypatch.setattr(packing, "_tasks", second)
        packed(sources / "parquet", target, drop_duplicates=True)
        assert digest(target) == whole
        assert sorted(first.ran + second.ran) == sorted(tasks)  # nothing was done twice


def test_killed_at_any_write_it_goes_on_and_ends_with_the_same_bytes(sources, tmp_path, monkeypatch, here):
    writes, write, last = [], Store.write, None

    def counted(store, name, content):
        if last is not None and len(writes) == last:
            raise Killed
        writes.append(name)
        write(store, name, content)

    monkeypatch.setattr(Store, "write", counted)
    packed(sources / "parquet", tmp_path / "whole")
    whole, names = digest(tmp_path / "whole"), list(writes)
    assert names[0] == "_moco_ray/unfinished.json" and names[-1] == "_moco_ray/pack.json" and len(names) > 40
    for stop in [*range(0, len(names), 6), len(names) - 3, len(names) - 2, len(names) - 1]:
        writes, last = [], stop
        with pytest.raises(Killed):
            packed(sources / "parquet", tmp_path / str(stop))
        last = None
        packed(sources / "parquet", tmp_path / str(stop))
        assert digest(tmp_path / str(stop)) == whole


def test_objects_that_were_lost_or_cut_are_made_again(sources, tmp_path, monkeypatch, here):
    packed(sources / "parquet", tmp_path / "whole")
    target, parts = tmp_path / "out", tmp_path / "out/_moco_ray/parts"
    first = Here()
    first.last = len(here.ran) - 2
    monkeypatch.setattr(packing, "_tasks", first)
    with pytest.raises(Killed):
        packed(sources / "parquet", target)
    (parts / "scatter-00002.arrow").write_bytes((parts / "scatter-00002.arrow").read_bytes()[:-1])
    (parts / "scatter-00003.json").unlink()  # written last: what is without it does not count
    (parts / "duplicates-00001.rows").unlink()
    (target / "part-00004.parquet").write_bytes(b"cut")
    (target / "part-00003.parquet").unlink()
    second = Here()
    monkeypatch.setattr(packing, "_tasks", second)
    packed(sources / "parquet", target)
    assert digest(target) == digest(tmp_path / "whole")
    again = {("scatter", 2), ("scatter", 3), ("duplicates", 1), ("gather", 4), ("gather", 3)}
    assert set(second.ran) & set(first.ran) == again


def test_killed_while_it_cleans_up_it_only_cleans_up(sources, tmp_path, monkeypatch, here):
    packed(sources / "parquet", tmp_path / "whole")
    deleted, delete = [], Store.delete

    def stop(store, name):
        if len(deleted) == 5:
            raise Killed
        deleted.append(name)
        delete(store, name)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(slices_module, "READ_THREADS", 1)
        patch.setattr(Store, "delete", stop)
        packed(sources / "parquet", tmp_path / "out")
    before = len(here.ran)
    assert (tmp_path / "out/_moco_ray/unfinished.json").exists() and deleted
    packed(sources / "parquet", tmp_path / "out")
    assert len(here.ran) == before and digest(tmp_path / "out") == digest(tmp_path / "whole")
    assert set(files(tmp_path / "out")) == {f"part-{n:05}.parquet" for n in range(7)} | {
        f"_moco_ray/{name}" for name in ("pack.json", "bad_rows.jsonl", "manifest.parquet")
    }


def test_a_packed_target_is_left_as_it_is_and_said_to_be_done(sources, tmp_path, here):
    packed(sources / "parquet", tmp_path / "out")
    before, ran = files(tmp_path / "out"), len(here.ran)
    facts = packed(sources / "parquet", tmp_path / "out")
    assert facts["already_there"] and files(tmp_path / "out") == before and len(here.ran) == ran
    assert "was packed before, with the same settings: nothing was done" in summary(facts, "out")
    (tmp_path / "out" / "part-00001.parquet").write_bytes(b"cut")
    with pytest.raises(UserError, match="part-00001.parquet has 3 bytes"):
        packed(sources / "parquet", tmp_path / "out")


@pytest.mark.parametrize("option, value", [
    ("seed", 5), ("drop_duplicates", True), ("short_side", 4), ("quality", 50), ("max_image_pixels", 1000),
    ("label_column", ""), ("shard_bytes", 50_000), ("task_bytes", 25_000),
])  # fmt: skip
def test_a_target_begun_or_packed_with_other_settings_is_refused_by_their_name(sources, tmp_path, here, option, value):
    here.last = 3
    with pytest.raises(Killed):
        packed(sources / "parquet", tmp_path / "out")
    with pytest.raises(UserError, match=rf"was begun with other settings: .*{option} is .*, and was .*delete this one"):
        packed(sources / "parquet", tmp_path / "out", **{option: value})
    here.last = None
    packed(sources / "parquet", tmp_path / "out")
    with pytest.raises(UserError, match=rf"was packed with other settings: .*{option} is .*, and was "):
        packed(sources / "parquet", tmp_path / "out", **{option: value})


def test_another_source_or_other_software_is_refused_in_the_middle(sources, tmp_path, here, monkeypatch):
    here.last = 3
    with pytest.raises(Killed):
        packed(sources / "parquet", tmp_path / "out")
    with pytest.raises(UserError, match="was begun with other settings: .*source is "):
        packed(sources / "tree", tmp_path / "out")
    versions = {**pack_passes.versions(), "pyarrow": "99"}
    monkeypatch.setattr(pack_passes, "versions", lambda: versions)
    with pytest.raises(UserError, match="versions is .*'99'"):
        packed(sources / "parquet", tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(packing, "_tasks", Here())
    packed(sources / "parquet", tmp_path / "out")
    monkeypatch.setattr(pack_passes, "versions", lambda: versions)
    assert packed(sources / "parquet", tmp_path / "out")["already_there"]  # what others would write matters no more


def test_a_target_with_other_peoples_files_is_refused_and_not_touched(sources, tmp_path, here):
    for number, name in enumerate(["notes.txt", "part-00000.parquet", "_moco_ray/pack.txt", "sub/part-00000.parquet"]):
        target = tmp_path / str(number)
        (target / name).parent.mkdir(parents=True)
        (target / name).write_bytes(b"mine")
        with pytest.raises(UserError, match=f"{name} was not written by this command .*new folder as the target"):
            packed(sources / "parquet", target)
        assert files(target) == {name: b"mine"}
    (tmp_path / "foreign/_moco_ray").mkdir(parents=True)
    (tmp_path / "foreign/_moco_ray/pack.json").write_text("[1]")
    with pytest.raises(UserError, match="pack.json was not written by this command"):
        packed(sources / "parquet", tmp_path / "foreign")
    packed(sources / "parquet", tmp_path / "out")
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="notes.txt was not written by this command"):
        packed(sources / "parquet", tmp_path / "out")


def test_a_target_in_the_source_or_the_source_itself_is_refused(sources, tmp_path, here):
    shutil.copytree(sources / "parquet", tmp_path / "source")
    for target in (tmp_path / "source/packed", tmp_path / "source"):
        with pytest.raises(UserError, match="lies in the source"):
            packed(tmp_path / "source", target)
    with pytest.raises(UserError, match="was not written by this command"):
        packed(tmp_path / "source", tmp_path)
    assert packed(tmp_path / "source", tmp_path / "source2")["rows"] == len(GOOD)  # no part of the name alone


def test_duplicates_are_counted_and_dropped_on_request_but_for_the_first(tmp_path, here):
    images = IMAGES[:300] + IMAGES[50:90] + IMAGES[50:60]  # in other chunks, tasks and buckets' parts
    source = write_parquet(
        tmp_path / "source", images, list(range(len(images))))  # fmt: skip
    kept = packed(source, tmp_path / "kept")
    dropped = packed(source, tmp_path / "dropped", drop_duplicates=True)
    assert kept["duplicates"] == dropped["duplicates"] == 50
    assert kept["rows"] == 350 and dropped["rows"] == 300
    assert "50 (kept; --drop-duplicates leaves them out)" in summary(kept, "x")
    assert "50 (left out)" in summary(dropped, "x")
    numbers = table_of(tmp_path / "dropped")["label"].to_pylist()
    assert sorted(numbers) == list(range(300))  # the lowest row of each
    assert numbers == [n for n in table_of(tmp_path / "kept")["label"].to_pylist() if n < 300]


def test_equal_bytes_are_duplicates_and_equal_pixels_are_not(tmp_path, here):
    images = [picture(1), picture(1), picture(1, compress_level=0), picture(1, "bmp"), picture(1, "bmp")]
    facts = packed(write_parquet(tmp_path / "source", images, None), tmp_path / "out", drop_duplicates=True)
    assert facts["duplicates"] == 1 and facts["rows"] == 2 and facts["bad"] == {"unsupported": 2}


def test_progressive_jpegs_are_stored_as_baseline_with_the_same_pixels(tmp_path, here):
    pytest.importorskip("turbojpeg")
    images = [picture(n, "jpeg", progressive=n % 2 == 0) for n in range(40)]
    pieces = images[0].split(b"\xff\xda")
    images[0] = b"\xff\xda".join(pieces[:2]).rpartition(b"\xff\xc4")[0] + b"\xff\xd9"  # scans that end early
    facts = packed(write_parquet(tmp_path / "source", images, list(range(40))), tmp_path / "out")
    assert (facts["made_baseline"], facts["kept_progressive"], facts["re_encoded"]) == (19, 1, 0)
    for image, number in zip(
        *(table_of(tmp_path / "out")[name].to_pylist() for name in ("image", "label")), strict=True
    ):
        assert is_progressive(image) == (number == 0)
        assert torch.equal(decode(image, 10_000), decode(images[number], 10_000))
        assert number % 2 == 0 or image == images[number]
    assert "19 progressive made baseline without loss, 1 kept progressive" in summary(facts, "x")


def test_larger_images_are_re_encoded_only_when_asked_for_and_that_is_stated(tmp_path, here):
    images = [picture(n, "png" if n % 2 else "jpeg", side=60 if n % 3 else 20) for n in range(30)]
    source = write_parquet(tmp_path / "source", images, list(range(30)))
    facts = packed(source, tmp_path / "out", short_side=24, quality=80)
    assert facts["re_encoded"] == 20 and "short side 24, quality 80" in facts["change_of_the_data"]
    assert "re-encoded 20, lossy: " in summary(facts, "x")
    for image, number in zip(
        *(table_of(tmp_path / "out")[name].to_pylist() for name in ("image", "label")), strict=True
    ):
        assert image == images[number] if number % 3 == 0 else decode(image, 10_000).shape == (3, 24, 25)
    facts = packed(source, tmp_path / "as_is")
    assert facts["re_encoded"] == 0 and facts["change_of_the_data"] == "" and "lossy" not in summary(facts, "x")


def test_labels_may_be_strings_or_null_or_in_another_column_or_left_out(tmp_path, here):
    names = [None if n % 9 == 0 else f"class {n % 3}" for n in range(100)]
    numbers = list(range(100))
    source = write_parquet(tmp_path / "source", IMAGES[:100], names, number=numbers, id=[f"i{n}" for n in range(100)])
    packed(source, tmp_path / "strings")
    table = table_of(tmp_path / "strings")
    order = [int(name[1:]) for name in table["id"].to_pylist()]  # ids of the source are kept
    assert sorted(order) == numbers and table["label"].to_pylist() == [names[n] for n in order]
    packed(source, tmp_path / "numbers", label_column="number")
    table = table_of(tmp_path / "numbers")
    assert table["label"].type == pa.int64() and table["label"].to_pylist() == [
        int(i[1:]) for i in table["id"].to_pylist()
    ]
    facts = packed(source, tmp_path / "none", label_column="")
    assert table_of(tmp_path / "none").column_names == ["image", "id"] and facts["labelled"] == 0
    bare = write_parquet(tmp_path / "bare", IMAGES[:50], None)
    packed(bare, tmp_path / "bare_out")
    assert table_of(tmp_path / "bare_out").column_names == ["image", "id"]


def test_unfit_label_columns_are_refused_before_anything_is_written(tmp_path, here):
    source = write_parquet(tmp_path / "source", IMAGES[:50], [[n] for n in range(50)])
    for column, match in (
        (None, "column 'label' is of type list.*or '' for none"),
        ("kind", "has no column 'kind'; name one"),
    ):
        with pytest.raises(UserError, match=match):
            packed(source, tmp_path / "out", label_column=column)
    assert not (tmp_path / "out").exists()
    write_parquet(tmp_path / "mixed", IMAGES[:50], list(range(50)))
    pq.write_table(pa.table({"image": IMAGES[50:60], "label": ["x"] * 10}), tmp_path / "mixed/b.parquet")
    with pytest.raises(
        UserError, match=r"b.parquet: its columns \['label'\] have other types than those of 00000.parquet"
    ):
        packed(tmp_path / "mixed", tmp_path / "out")


def test_a_source_without_one_image_is_refused_with_what_it_holds(tmp_path, here):
    source = write_parquet(tmp_path / "source", [b"junk", b"", b"more junk"], None)
    with pytest.raises(UserError, match=r"none of the 3 rows of .* is an image \(1 empty, 2 not an image\)"):
        packed(source, tmp_path / "out")


@pytest.mark.parametrize("options, match", [
    ({"seed": -1}, "seed is -1"), ({"short_side": 0}, "short side is 0"), ({"quality": 0}, "quality is 0"),
    ({"quality": 101}, "quality is 101"), ({"max_image_pixels": 0}, "max_image_pixels is 0"),
])  # fmt: skip
def test_options_out_of_range_are_refused(options, match):
    with pytest.raises(UserError, match=match):
        PackOptions(**options)


def test_tasks_are_runs_of_chunks_within_bytes_and_rows(sources):
    manifest = build_manifest(str(sources / "tree"))
    for options in (PackOptions(**SMALL), PackOptions(task_rows=7), PackOptions(task_bytes=1)):
        cuts = pack_passes._cuts(manifest, options)
        assert cuts[0] == 0 and cuts[-1] == ROWS and (np.diff(cuts) > 0).all()
        sizes = np.add.reduceat(manifest.chunk_bytes, cuts[:-1])
        assert ((sizes <= options.task_bytes) | (np.diff(cuts) == 1)).all() and np.diff(cuts).max() <= options.task_rows
    assert len(cuts) == ROWS + 1  # a chunk larger than the limit is a task of its own


@pytest.mark.parametrize("slices", [1, 5, 63, 64, 65, 200])
def test_a_slice_of_an_object_is_read_back_alone_whatever_their_number(tmp_path, slices):
    rng, store = np.random.default_rng(slices), Store.at(str(tmp_path))
    objects = {f"{n}.x": [rng.bytes(int(rng.integers(0, 4)) * 3) for _ in range(slices)] for n in range(3)}
    for name, content in objects.items():
        store.write(name, joined(content))
    sizes = tuple(store.size(name) for name in objects)
    parts = Parts(store, tuple(objects), sizes, slices, "test")
    for index in range(slices):
        assert parts.read(index) == [content[index] for content in objects.values()]


def test_labels_keep_the_names_of_their_classes_so_that_two_sets_are_compared_or_refused(sources, tmp_path, here):
    packed(sources / "tree", tmp_path / "out")
    tree = build_manifest(str(sources / "tree"))
    assert tree.classes and build_manifest(str(tmp_path / "out")).classes == tree.classes


def test_damage_to_what_pack_tells_of_its_result_is_told(sources, tmp_path, here):
    packed(sources / "parquet", tmp_path / "out")
    (tmp_path / "out/_moco_ray/pack.json").write_text("{}")
    with pytest.raises(UserError, match="pack.json is damaged; bring it back, or remove it to use the shards as they are"):
        build_manifest(str(tmp_path / "out"))
    (tmp_path / "out/_moco_ray/pack.json").unlink()
    assert build_manifest(str(tmp_path / "out")).rows > 0
