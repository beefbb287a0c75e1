"""Demo data: Fashion-MNIST from small idx files written here, and the drawn prototypes. No network, no apt."""

import gzip
import hashlib
import io
import os
import struct
import subprocess

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from moco_ray.data import demo, demo_shards
from moco_ray.data.demo import fashion_mnist
from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.errors import UserError

TRAIN_ROWS, TEST_ROWS, VALIDATION_ROWS = 600, 40, 100


def idx(array: np.ndarray) -> bytes:
    """The idx format as published: 0, 0, 8 (unsigned bytes), dimensions, big-endian sizes, bytes."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def published(monkeypatch) -> dict[str, np.ndarray]:
    """Small arrays that pass for the published ones; the first pixels of an image spell its index."""
    random = np.random.default_rng(0)
    arrays = {}
    for part, rows in (("train", TRAIN_ROWS), ("t10k", TEST_ROWS)):
        images = random.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        images[:, 0, 0], images[:, 0, 1] = np.divmod(np.arange(rows), 256)
        arrays[f"{part}-images-idx3-ubyte"] = images
        arrays[f"{part}-labels-idx1-ubyte"] = random.integers(0, 10, rows, dtype=np.uint8)
    digests = {name: hashlib.sha256(idx(array)).hexdigest() for name, array in arrays.items()}
    monkeypatch.setattr(demo, "FASHION_FILES", digests)
    monkeypatch.setattr(demo_shards, "ROWS_PER_SHARD", 256)
    return arrays


@pytest.fixture
def source(published, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for name, array in published.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    return folder


@pytest.fixture
def no_commands(monkeypatch):
    """Fails where a command is started: what is whole or given must not be fetched."""

    def refuse(words, **_):
        raise AssertionError(f"started {words}")

    monkeypatch.setattr(subprocess, "run", refuse)


def read(folder) -> tuple[np.ndarray, list[int], list[str]]:
    """All rows of a folder in order: images rows,H,W uint8, labels, ids."""
    table = pq.read_table(sorted(folder.glob("*.parquet")))
    assert str(table.schema.field("image").type) == "binary" and str(table.schema.field("label").type) == "int64"
    images = [Image.open(io.BytesIO(content)) for content in table["image"].to_pylist()]
    assert {image.format for image in images} == {"PNG"}
    return np.stack([np.asarray(image) for image in images]), table["label"].to_pylist(), table["id"].to_pylist()


def content(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_published_image_comes_out_once_with_its_own_label(published, source, tmp_path, no_commands):
    summary = fashion_mnist(tmp_path / "out", source, VALIDATION_ROWS)
    assert summary["rows"] == {"train": 500, "validation": 100, "test": 40}
    seen = {"train": [], "t10k": []}
    for split, part in (("train", "train"), ("validation", "train"), ("test", "t10k")):
        images, labels, ids = read(tmp_path / "out" / split)
        places = images[:, 0, 0].astype(int) * 256 + images[:, 0, 1]
        assert np.array_equal(images, published[f"{part}-images-idx3-ubyte"][places])
        assert labels == published[f"{part}-labels-idx1-ubyte"][places].tolist()
        assert ids == [f"{part.replace('t10k', 'test')}-{place:05d}" for place in places]
        assert abs(np.corrcoef(places, np.arange(len(places)))[0, 1]) < 0.3  # shuffled
        seen[part] += places.tolist()
    assert sorted(seen["train"]) == list(range(TRAIN_ROWS)) and sorted(seen["t10k"]) == list(range(TEST_ROWS))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_shards_have_row_groups_of_128_rows(source, tmp_path):
    fashion_mnist(tmp_path / "out", source, VALIDATION_ROWS)
    files = [pq.ParquetFile(path).metadata for path in sorted((tmp_path / "out" / "train").glob("*.parquet"))]
    groups = [[file.row_group(g).num_rows for g in range(file.num_row_groups)] for file in files]
    assert groups == [[128, 128], [128, 116]]


def test_the_shuffle_is_fixed():
    """Recorded: raw PCG64 bits with seed 0, sorted. Another order would change every run on the demo data."""
    assert demo.shuffled(8, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert sorted(demo.shuffled(1000, 3)) == list(range(1000))


@pytest.mark.parametrize("layout", ["unpacked", "nested"])
def test_unpacked_and_nested_files_give_the_same_bytes(layout, published, source, tmp_path, no_commands):
    other = tmp_path / "other"
    inner = other / "FashionMNIST" / "raw" if layout == "nested" else other
    inner.mkdir(parents=True)
    for name, array in published.items():
        (inner / name).write_bytes(idx(array))
    fashion_mnist(tmp_path / "a", source, VALIDATION_ROWS)
    fashion_mnist(tmp_path / "b", other, VALIDATION_ROWS)
    a, b = content(tmp_path / "a"), content(tmp_path / "b")
    assert {name: a[name] for name in a if name != "summary.json"} == {n: b[n] for n in b if n != "summary.json"}


def test_a_whole_target_is_left_alone_and_needs_no_source(source, tmp_path, no_commands):
    assert not fashion_mnist(tmp_path / "out", source, VALIDATION_ROWS)["already_there"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert fashion_mnist(tmp_path / "out", None, VALIDATION_ROWS)["already_there"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


@pytest.mark.parametrize("loss", ["a cut shard", "a missing shard", "a cut summary", "empty"])
def test_an_incomplete_target_is_rebuilt(loss, source, tmp_path):
    target = tmp_path / "out"
    fashion_mnist(target, source, VALIDATION_ROWS)
    whole, shard = content(target), target / "train" / "part-00001.parquet"
    if loss == "a cut shard":
        os.truncate(shard, 100)
    elif loss == "a missing shard":
        shard.unlink()
    elif loss == "a cut summary":
        os.truncate(target / "summary.json", 40)
    else:
        target.rename(tmp_path / "moved")
        target.mkdir()
    assert not fashion_mnist(target, source, VALIDATION_ROWS)["already_there"]
    assert content(target) == whole


@pytest.mark.parametrize("moment", [(demo_shards, "_write_split"), (os, "replace")])
def test_a_build_that_is_interrupted_leaves_nothing(moment, source, tmp_path, monkeypatch):
    """In the second folder, and when all that is left to do is one rename."""
    calls, original = [], getattr(*moment)

    def interrupt(*words):
        calls.append(words)
        if moment[0] is os or len(calls) == 2:
            raise KeyboardInterrupt
        return original(*words)

    monkeypatch.setattr(*moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fashion_mnist(tmp_path / "out", source, VALIDATION_ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_target_with_other_files_or_other_arguments_is_not_touched(source, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis.txt was not written by demo-data; choose"):
        fashion_mnist(tmp_path / "mine", source, VALIDATION_ROWS)
    fashion_mnist(tmp_path / "out", source, VALIDATION_ROWS)
    before = content(tmp_path / "out")
    with pytest.raises(UserError, match="'validation_rows': 100.*not.*99"):
        fashion_mnist(tmp_path / "out", source, VALIDATION_ROWS - 1)
    assert content(tmp_path / "out") == before
    (tmp_path / "out" / "summary.json").write_text('{"images": 500}')  # somebody else's
    with pytest.raises(UserError, match="summary.json was not written by demo-data"):
        fashion_mnist(tmp_path / "out", source, VALIDATION_ROWS)
    (tmp_path / "out" / "summary.json").unlink()  # shards without a summary may be somebody's own
    with pytest.raises(UserError, match="was not written by demo-data"):
        fashion_mnist(tmp_path / "out", source, VALIDATION_ROWS)
    assert len(content(tmp_path / "out")) == len(before) - 1 and (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: gzip.compress(raw)[:-300], "is damaged"),
        (lambda raw: b"<html>404</html>", "is damaged"),
        (lambda raw: gzip.compress(raw[:100] + b"x" + raw[101:]), "not the published file"),
        (lambda raw: gzip.compress(raw[:-1]), "promises"),
        (lambda raw: gzip.compress(b"\0\0\x08\x01" + raw[4:]), "0x00000803"),
        (lambda raw: gzip.compress(raw[:3]), "0x00000803"),
    ],
)
def test_a_corrupted_file_is_named_and_nothing_is_written(damage, message, published, source, tmp_path):
    name = "train-images-idx3-ubyte"
    (source / f"{name}.gz").write_bytes(damage(idx(published[name])))
    with pytest.raises(UserError, match=f"{name}.gz .*{message}"):
        fashion_mnist(tmp_path / "out", source, VALIDATION_ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_images_and_labels_that_differ_in_number_are_refused(published, source, tmp_path, monkeypatch):
    short = idx(published["t10k-labels-idx1-ubyte"][:-1])
    (source / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(short))
    monkeypatch.setitem(demo.FASHION_FILES, "t10k-labels-idx1-ubyte", hashlib.sha256(short).hexdigest())
    with pytest.raises(UserError, match="t10k has 40 images, but 39 labels"):
        fashion_mnist(tmp_path / "out", source, VALIDATION_ROWS)


def test_a_given_folder_without_the_files_is_an_error_and_nothing_else_is_tried(published, tmp_path, no_commands):
    with pytest.raises(UserError, match=r"lacks train-images-idx3-ubyte.gz, .*t10k-labels-idx1-ubyte.gz"):
        fashion_mnist(tmp_path / "out", tmp_path / "nowhere", VALIDATION_ROWS)


@pytest.mark.parametrize("rows", [0, -5, TRAIN_ROWS])
def test_validation_rows_must_leave_rows_on_both_sides(rows, source, tmp_path):
    with pytest.raises(UserError, match="choose 1 to 599"):
        fashion_mnist(tmp_path / "out", source, rows)


def test_nothing_found_lists_each_attempt_and_its_reason(published, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "INSTALLED", tmp_path / "not-installed")
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt-get
    program = "#!/bin/sh\necho one >&2\necho 'no route to host' >&2\nexit 7\n"
    (tmp_path / "python").write_text(program)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError) as failure:
        fashion_mnist(tmp_path / "out", None, VALIDATION_ROWS)
    text = str(failure.value)
    assert "not-installed lacks train-images-idx3-ubyte.gz" in text
    assert "apt-get failed ([Errno 2] No such file or directory: 'apt-get')" in text
    assert "torchvision's download failed (python left with code 7: no route to host)" in text
    assert "give the folder that holds them" in text and "\n" not in text
    assert not (tmp_path / "out").exists()


def test_apt_is_asked_again_with_lists_of_our_own_and_its_package_is_read(source, tmp_path, monkeypatch):
    """apt-get and dpkg are scripts here: the first download fails, as on an image without package lists."""
    monkeypatch.setattr(demo, "INSTALLED", tmp_path / "usr" / "share")
    tools = tmp_path / "tools"
    tools.mkdir()
    log = tmp_path / "log"
    apt = (
        f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in\n*State*download*) : > dataset-fashion-mnist_1_all.deb ;;\n'
        "*update) ;;\n*) echo 'E: Unable to locate package' >&2; exit 100 ;;\nesac\n"
    )
    inner = f'"$3"/{(tmp_path / "usr" / "share").relative_to("/")}'
    dpkg = f"#!/bin/sh\n/bin/mkdir -p {inner} && /bin/cp {source}/* {inner}\n"
    for name, program in (("apt-get", apt), ("dpkg", dpkg)):
        (tools / name).write_text(program)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.chdir(tmp_path)  # a relative target once led dpkg astray
    summary = fashion_mnist(demo.Path("out"), None, VALIDATION_ROWS)
    assert summary["origin"] == "Debian's package dataset-fashion-mnist by apt-get"
    asked = [line.split()[-1] for line in log.read_text().splitlines()]
    assert asked == ["dataset-fashion-mnist", "update", "dataset-fashion-mnist"]
    assert len(read(tmp_path / "out" / "test")[1]) == TEST_ROWS


def test_a_command_that_hangs_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "ATTEMPT_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"sleep took longer than 0.2 s"):
        demo._command(["sleep", "30"], tmp_path)


def test_prototypes_are_balanced_seeded_and_seen_anew_each_time(tmp_path):
    first = drawn_prototypes(tmp_path / "a", rows=200, test_rows=40, seed=5, pixels=32)
    assert first["rows"] == {"train": 200, "test": 40} and len(first["classes"]) == 20
    images, labels, ids = read(tmp_path / "a" / "train")
    assert images.shape == (200, 32, 32) and images.dtype == np.uint8
    assert np.bincount(labels).tolist() == [10] * 20 and labels != sorted(labels) and len(set(ids)) == 200
    everything = np.concatenate([images, read(tmp_path / "a" / "test")[0]])
    assert len({image.tobytes() for image in everything}) == 240
    drawn_prototypes(tmp_path / "b", rows=200, test_rows=40, seed=5, pixels=32)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    drawn_prototypes(tmp_path / "c", rows=200, test_rows=40, seed=6, pixels=32)
    assert not np.array_equal(read(tmp_path / "c" / "train")[0], images)
    assert drawn_prototypes(tmp_path / "c", rows=200, test_rows=40, seed=6, pixels=32)["already_there"]


def test_raw_pixels_leave_room_to_learn(tmp_path):
    """1-NN (cosine) from the first 10 images of each class, over two seeds: 0.36 and 0.38 when recorded; ± 0.06."""
    for seed in (0, 1):
        drawn_prototypes(tmp_path / str(seed), rows=1200, test_rows=600, seed=seed)
        (bank, bank_labels, _), (query, labels, _) = (read(tmp_path / str(seed) / name) for name in ("train", "test"))
        rows = np.concatenate([np.flatnonzero(np.array(bank_labels) == label)[:10] for label in range(20)])
        bank, query = bank[rows].reshape(200, -1).astype(float), query.reshape(600, -1).astype(float)
        nearest = (query @ (bank / np.linalg.norm(bank, axis=1, keepdims=True)).T).argmax(axis=1)
        accuracy = (np.array(bank_labels)[rows][nearest] == labels).mean()
        assert 0.30 < accuracy < 0.44


@pytest.mark.parametrize("change", [{"rows": 19}, {"test_rows": 0}, {"pixels": 7}])
def test_too_few_rows_or_pixels_are_refused(change, tmp_path):
    with pytest.raises(UserError, match="at least 20"):
        drawn_prototypes(tmp_path / "out", **{"rows": 40, "test_rows": 40, **change})
