"""The index of WebDataset tars and the samples of a chunk, against tarfile's own list and on a real server."""

import io
import os
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moco_ray.data import storage, survey, tars
from moco_ray.data.listing import Index
from moco_ray.data.shards import read_chunk_rows, samples_of
from moco_ray.data.storage import Entry, Store
from moco_ray.data.survey import build_manifest
from moco_ray.errors import UserError
from tests.fault_proxy import FaultProxy
from tests.object_stores import rclone_server

LONG = "a folder of many lètters and spaces/" * 5  # 185 bytes: beyond the 100 of a plain header


def image(number: int, size: int = 700) -> bytes:
    """Stands for an encoded image: nothing here decodes."""
    return np.random.default_rng(number).bytes(size)


def write_tar(path: Path, members: list[tuple[str, bytes | None]], form: int = tarfile.PAX_FORMAT) -> Path:
    """Members by name and content, None for a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content or b""), tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            archive.addfile(member, io.BytesIO(content or b""))
    return path


def labelled(numbers, label=lambda number: number % 10) -> list[tuple[str, bytes]]:
    """Samples as WebDataset sorts them: the .cls before the .jpg."""
    return [pair for i in numbers for pair in ((f"{i:05}.cls", b"%d" % label(i)), (f"{i:05}.jpg", image(i)))]


def scanned(path: Path) -> Index:
    return tars.scan_tar(Store(str(path.parent)), Entry(path.name, path.stat().st_size, 0))


def samples(path: Path, index: Index) -> list[tars.Sample]:
    """All rows of a tar, chunk by chunk."""
    store = Store(str(path.parent))
    chunks = zip(index.offset.tolist(), index.bytes.tolist(), strict=True)
    return [sample for offset, length in chunks for sample in tars.read_samples(store, path.name, offset, length)]


def message(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is a row, and what is a chunk


def test_chunks_are_whole_samples_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "CHUNK_ROWS", 4)
    path = write_tar(tmp_path / "a.tar", [(f"{i:05}.{s}", image(i)) for i in range(10) for s in ("jpg", "cls", "json")])
    index = scanned(path)
    assert index.rows.tolist() == [4, 4, 2] and index.damage == ""
    assert index.offset.tolist() == [0, *np.cumsum(index.bytes)[:-1].tolist()], "without a gap"
    last = tarfile.open(path).getmembers()[-1]
    assert index.offset[-1] + index.bytes[-1] == last.offset_data + 1024, "to the end of the last member's blocks"
    found = samples(path, index)
    assert [(sample.key, sample.image) for sample in found] == [(f"{i:05}", image(i)) for i in range(10)]
    assert all(sample.fields == {"cls": sample.image, "json": sample.image} for sample in found)


def test_a_chunk_ends_with_the_sample_that_reaches_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "CHUNK_BYTES", 8000)
    path = write_tar(tmp_path / "a.tar", [(f"{i}.png", image(i, 3000)) for i in range(7)])  # 3584 bytes each
    assert scanned(path).rows.tolist() == [3, 3, 1]
    assert [sample.image for sample in samples(path, scanned(path))] == [image(i, 3000) for i in range(7)]


def test_every_row_number_of_unequal_tars_leads_to_its_image(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "CHUNK_ROWS", 3)
    write_tar(tmp_path / "b.tar", labelled(range(11)))
    write_tar(tmp_path / "a" / "one.TAR", labelled([11]))
    write_tar(tmp_path / "c.tar", labelled(range(12, 17)))
    manifest = build_manifest(str(tmp_path))
    assert manifest.layout == "tar" and manifest.names.to_pylist() == ["a/one.TAR", "b.tar", "c.tar"]
    assert manifest.chunk_rows.tolist() == [1, 3, 3, 3, 2, 3, 2] and manifest.part.tolist() == [0, 0, 1, 2, 3, 0, 1]
    numbers = [11, *range(11), *range(12, 17)]
    chunks, inner = manifest.locate(np.arange(17))
    for number, chunk, row in zip(numbers, chunks, inner, strict=True):
        found = read_chunk_rows(manifest, chunk, np.array([row]), "label")
        assert found.encoded == [image(number)] and found.labels.tolist() == [number % 10]
    assert manifest.source(16) == "c.tar part 1 row 1"
    twice = read_chunk_rows(manifest, 1, np.array([2, 0, 2]), "label")
    assert twice.encoded == [image(2), image(0), image(2)] and twice.labels.tolist() == [2, 0, 2]


def test_one_image_with_a_plain_suffix_is_the_row_and_the_others_are_its_fields(tmp_path):
    path = write_tar(
        tmp_path / "a.tar", [("n/1.jpg", b"photo"), ("n/1.seg.png", b"mask"), ("n/1.CLS", b"3"), ("n/2.JPG", b"p")]
    )
    assert samples(path, scanned(path)) == [
        tars.Sample("n/1", b"photo", {"seg.png": b"mask", "cls": b"3"}), tars.Sample("n/2", b"p", {})
    ]  # fmt: skip


def test_where_no_single_image_is_the_row_each_is_one_so_that_dots_in_names_lose_none(tmp_path):
    names = [
        "IMG.1.jpg",
        "IMG.2.jpg",
        "b.jpg",
        "b.png",
        "b.2.png",
        "v1.0/cat.jpg",
        "v1.0/dog.one.webp",
        "c.1.jpeg",
        "c.cls",
    ]
    path = write_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    found = samples(path, scanned(path))
    assert [sample.image.decode() for sample in found] == names[:-1]
    assert [sample.key for sample in found] == ["IMG.1", "IMG.2", "b", "b", "b.2", "v1.0/cat", "v1.0/dog", "c"]
    assert found[-1].fields == {"cls": b"c.cls"} and found[0].fields == {}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_long_names_in_any_letters_begin_chunks_as_well_as_short_ones(tmp_path, monkeypatch, form):
    """Their headers have headers of their own, which belong to the chunk."""
    monkeypatch.setattr(tars, "CHUNK_ROWS", 1)
    names = [f"{LONG}{i}.jpg" for i in range(3)] + ["./short 雪.png", f"{'x' * 240}.jpg", "plain.jpg"]
    path = write_tar(tmp_path / "a.tar", [(name, image(i)) for i, name in enumerate(names)], form)
    index = scanned(path)
    assert index.rows.tolist() == [1] * 6 and index.damage == ""
    found = samples(path, index)
    assert [sample.key for sample in found] == [name.rpartition(".")[0] for name in names]
    assert [sample.image for sample in found] == [image(i) for i in range(6)]


def test_hidden_files_folders_links_and_strangers_are_no_rows_and_part_no_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "CHUNK_ROWS", 2)
    members = [("n", None), ("n/._1.jpg", b"mac"), ("n/1.jpg", image(1)), ("n/._1.cls", b"mac"), ("n/1.cls", b"1"),
               ("README.txt", b"about"), ("n/2.jpg", image(2)), ("m", None), ("m/3.jpg", image(3)), ("LICENSE", b""),
               ]  # fmt: skip
    path = write_tar(tmp_path / "a.tar", members)
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("n/4.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "n/1.jpg"
        archive.addfile(link)
    index = scanned(path)
    found = samples(path, index)
    assert index.rows.tolist() == [2, 1] and [sample.image for sample in found] == [image(1), image(2), image(3)]
    assert found[0].fields == {"cls": b"1"} and found[1].fields == {}


# Labels


def test_a_label_is_the_number_in_cls_or_under_the_column_in_json(tmp_path):
    fields = [("cls", b"7"), ("cls", b" 12\n"), ("json", b'{"label": 3, "kind": 4}'), ("json", b"5")]
    write_tar(
        tmp_path / "a.tar", [m for i, (s, c) in enumerate(fields) for m in ((f"{i}.jpg", image(i)), (f"{i}.{s}", c))]
    )
    manifest, rows = build_manifest(str(tmp_path)), np.arange(4)
    assert read_chunk_rows(manifest, 0, rows, "label").labels.tolist() == [7, 12, 3, 5]
    assert read_chunk_rows(manifest, 0, rows[:3], "label").labels.dtype == np.int64
    assert [tars.label_of(sample, "kind") for sample in samples_of(manifest, 0)] == [7, 12, 4, 5]
    assert read_chunk_rows(manifest, 0, rows).labels is None


@pytest.mark.parametrize("suffix, content", [("txt", b"7"), ("cls", b"cat"), ("json", b"{"),
                                             ("json", b'{"label": "cat"}'),
                                             ("json", b'{"label": 1.5}'), ("json", b"[1]")])  # fmt: skip
def test_a_sample_without_an_integer_label_is_named(tmp_path, suffix, content):
    members = [("n/1.jpg", b"i"), ("n/1.cls", b"1"), ("n/2.jpg", b"i"), (f"n/2.{suffix}", content)]
    write_tar(tmp_path / "a.tar", members)
    manifest = build_manifest(str(tmp_path))
    text = message(read_chunk_rows, manifest, 0, np.array([0]), "label")
    assert text.startswith(f"{tmp_path}/a.tar: sample n/2 has no integer label: no .cls, and no 'label' in a .json")
    assert manifest.rows == 2 and read_chunk_rows(manifest, 0, np.array([1])).encoded == [b"i"], (
        "of no matter to training"
    )


def test_tars_sorted_by_class_are_warned_of_and_mixed_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "CHUNK_ROWS", 8)
    kinds = {"sorted": lambda i: i // 16, "mixed": lambda i: i % 2, "one": lambda _: 7}
    for name, label in kinds.items():
        write_tar(tmp_path / name / "a.tar", labelled(range(32), label))
    write_tar(tmp_path / "bare" / "a.tar", [(f"{i}.jpg", image(i)) for i in range(32)])
    (warning,) = build_manifest(str(tmp_path / "sorted")).warnings
    assert "the rows are sorted by class: 4 of 4" in warning and "'.cls'" in warning and "moco-ray pack" in warning
    for name in ("mixed", "one", "bare"):
        assert build_manifest(str(tmp_path / name)).warnings == ()


def test_label_ranges_of_the_index_are_those_of_cls_alone(tmp_path):
    """A .json may be long, and is left unread."""
    members = [(f"{i}.{suffix}", b"%d" % i) for i in range(4) for suffix in ("jpg", "json")]
    assert scanned(write_tar(tmp_path / "a.tar", members)).labels.known == 0
    members = [(f"{i}.{suffix}", b"%d" % i) for i in range(4) for suffix in ("jpg", "cls")]
    assert scanned(write_tar(tmp_path / "b.tar", members)).labels.spans == {(0, 3)}


# Tars that are not whole, or no tars


def test_a_tar_cut_anywhere_keeps_every_image_before_that_point_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "CHUNK_ROWS", 2)
    whole = write_tar(tmp_path / "whole" / "a.tar", labelled(range(5)))
    members, content = tarfile.open(whole).getmembers(), whole.read_bytes()
    cut, end = tmp_path / "cut.tar", tarfile.open(whole).getmembers()[-1].offset_data + 1024
    edges = [at + d for member in members for at in (member.offset, member.offset_data) for d in (-1, 0, 1, 300)]
    for size in sorted({*edges, *range(700, end, 211)}):
        if size < 512:
            continue  # a first header that is cut is no tar
        cut.write_bytes(content[:size])
        index = scanned(cut)
        before = [m for m in members if m.name.endswith("jpg") and m.offset_data + m.size <= size]
        assert index.rows.sum() == len(before), size
        assert [s.image for s in samples(cut, index)] == [image(i) for i in range(len(before))], size
        boundary = size in {m.offset for m in members} | {end}
        says = "it has no end mark and may be cut short" if boundary else f"it is cut short at byte {size}"
        assert index.damage == says, size


def test_a_damaged_header_ends_a_tar_there_and_so_does_a_hole_of_zeros(tmp_path):
    path = write_tar(tmp_path / "a.tar", labelled(range(6)))
    content, header = path.read_bytes(), tarfile.open(path).getmember("00004.cls").offset
    for hole, says in (
        (image(9, 512), f"it is damaged at byte {header}"),
        (bytes(512), f"it goes on after an end mark at byte {header}"),
    ):
        path.write_bytes(content[:header] + hole + content[header + 512 :])
        index = scanned(path)
        assert index.damage == says and index.rows.tolist() == [4]
        assert [sample.image for sample in samples(path, index)] == [image(i) for i in range(4)]


def test_of_tars_joined_end_to_end_the_first_is_used_and_the_rest_is_told(tmp_path):
    first, second = (write_tar(tmp_path / name, labelled(range(3))).read_bytes() for name in ("1", "2"))
    path = tmp_path / "a.tar"
    path.write_bytes(first + second)
    assert scanned(path).damage.startswith("it goes on after an end mark at byte ") and scanned(path).rows.tolist() == [
        3
    ]


def test_the_warning_of_a_cut_tar_names_it_and_how_many_images_are_kept(tmp_path):
    for name in ("a", "b", "c"):
        write_tar(tmp_path / f"{name}.tar", labelled(range(6)))
    (tmp_path / "b.tar").write_bytes((tmp_path / "b.tar").read_bytes()[:6000])  # of 2560 bytes a sample
    (tmp_path / "empty.tar").touch()
    manifest = build_manifest(str(tmp_path))
    assert manifest.rows == 6 + 2 + 6 and manifest.names.to_pylist() == ["a.tar", "b.tar", "c.tar"]
    assert manifest.warnings == (
        f"{tmp_path}: 2 tars are not whole, the images before that point are used (b.tar: it is cut short at byte "
        "6000, 2 images kept; empty.tar: it has 0 bytes, 0 images kept)",
    )


def test_many_damaged_tars_are_one_line(tmp_path):
    for number in range(5):
        write_tar(tmp_path / f"{number}.tar", labelled(range(2)))
        (tmp_path / f"{number}.tar").write_bytes((tmp_path / f"{number}.tar").read_bytes()[:3000])
    (warning,) = build_manifest(str(tmp_path)).warnings
    assert (
        warning.startswith(f"{tmp_path}: 5 tars are not whole")
        and "2.tar: " in warning
        and warning.endswith("; 2 more)")
    )


def test_what_is_no_tar_is_refused_by_name_and_tars_without_images_too(tmp_path):
    write_tar(tmp_path / "text" / "a.tar", labelled(range(2)))
    (tmp_path / "text" / "b.tar").write_text("<html>404 Not Found</html>" * 100)
    text = message(build_manifest, str(tmp_path / "text"))
    assert text.startswith(f"{tmp_path}/text/b.tar is no tar (") and text.endswith("; write it again or remove it")
    (tmp_path / "zeros").mkdir()
    (tmp_path / "zeros" / "a.tar").write_bytes(bytes(10240))
    assert f"the 1 files in {tmp_path}/zeros hold no rows" in message(build_manifest, str(tmp_path / "zeros"))
    (tmp_path / "zeros" / "a.tar").write_bytes(b"")
    assert "(1 tars are not whole, the images" in message(build_manifest, str(tmp_path / "zeros"))
    write_tar(tmp_path / "words" / "a.tar", [("1.txt", b"one"), ("1.cls", b"1")])
    assert "hold no rows; give a folder with images" in message(build_manifest, str(tmp_path / "words"))


def test_a_tar_that_changed_after_it_was_indexed_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "CHUNK_ROWS", 4)
    path = write_tar(tmp_path / "a.tar", labelled(range(8)))
    manifest, content, row = build_manifest(str(tmp_path)), path.read_bytes(), np.array([0])
    changes = {
        "part 1 holds 3 images, not 4": labelled(range(7)) + [("x.txt", image(0)), ("y.txt", b"")],
        "invalid header": None,  # the same bytes moved
    }
    for says, members in changes.items():
        write_tar(path, members) if members else path.write_bytes(b"x" * 512 + content)
        text = message(read_chunk_rows, manifest, 1, row)
        assert text == (
            f"{path} has changed since its manifest was built ({says}); put it back as it was, or begin a new run"
        )
    path.write_bytes(content[: manifest.offset[1] + 100])
    assert message(read_chunk_rows, manifest, 1, row).startswith(
        f"{path} has changed: of its bytes {manifest.offset[1]} to "
    )
    path.unlink()
    assert f"{path} cannot be read" in message(read_chunk_rows, manifest, 1, row)
    path.write_bytes(content)
    assert read_chunk_rows(manifest, 1, row).encoded == [image(4)]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_a_tar_damaged_at_random_gives_rows_that_can_be_read_or_one_line(tmp_path, form):
    names = [f"{LONG}{i}.{suffix}" for i in range(4) for suffix in ("jpg", "cls")]
    path = write_tar(tmp_path / "a.tar", [(name, image(i)) for i, name in enumerate(names)], form)
    content, rng, outcomes = path.read_bytes(), np.random.default_rng(0), {"whole": 0, "part": 0, "refused": 0}
    for trial in range(150):
        damaged = bytearray(content)
        if trial % 3 == 0:
            damaged = damaged[: rng.integers(1, len(content))]
        for at in rng.integers(0, len(damaged), rng.integers(0, 8)):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            index = scanned(path)
        except UserError as error:
            assert str(error).startswith(f"{path} is no tar (")
            outcomes["refused"] += 1
            continue
        assert len(samples(path, index)) == index.rows.sum()
        outcomes["part" if index.damage else "whole"] += 1
    assert min(outcomes.values()) > 5, outcomes


# From object storage


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """Two tars on disk, the same in S3 behind a proxy: (folder, store, proxy). Of 300 and of 25 samples."""
    write_tar(tmp_path / "bucket" / "set" / "large.tar", labelled(range(300)))
    write_tar(tmp_path / "bucket" / "set" / "small.tar", labelled(range(300, 325)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for path in (tmp_path / "bucket" / "set").iterdir():  # pyarrow cannot read .5 seconds, which rclone makes of .500
        os.utime(path, ns=(0, 1_700_000_000_123_000_000))
    with rclone_server(tmp_path, follow=False) as server, FaultProxy(server.endpoint) as proxy:
        for name, value in server.behind(proxy.endpoint).environment().items():
            monkeypatch.setenv(name, value)
        storage._open.cache_clear()
        yield tmp_path / "bucket" / "set", Store.at("s3://bucket/set"), proxy
    storage._open.cache_clear()


def ranges(proxy: FaultProxy, name: str) -> list[tuple[int, int]]:
    """First and last byte of each range that was asked of an object."""
    found = [each.byte_range for each in proxy.requests if each.method == "GET" and each.path.endswith(name)]
    return [tuple(int(part) for part in text.removeprefix("bytes=").split("-")) for text in found]


def test_tars_in_object_storage_are_indexed_by_one_read_and_then_read_by_range(remote, monkeypatch, capsys):
    folder, store, proxy = remote
    block = 32 << 10
    monkeypatch.setattr(tars, "REMOTE_BLOCK_BYTES", block)
    manifest = build_manifest(store.uri)
    for name in ("large.tar", "small.tar"):
        asked, size = ranges(proxy, name), (folder / name).stat().st_size
        assert sum(last - first + 1 for first, last in asked) <= size, "nothing is read twice"
        assert len(asked) <= -(-size // block), "a request a block"
    assert size > block and "indexing 2 tars by one full read of 0.00085 GB" in capsys.readouterr().err
    assert manifest.chunk_rows.tolist() == [128, 128, 44, 25]

    on_disk = build_manifest(str(folder))
    assert manifest.fingerprint == on_disk.fingerprint and manifest != on_disk
    for chunk in range(4):
        proxy.clear()
        rows = np.arange(manifest.chunk_rows[chunk])
        found = read_chunk_rows(manifest, chunk, rows, "label")
        first, length = int(manifest.offset[chunk]), int(manifest.chunk_bytes[chunk])
        assert ranges(proxy, ".tar") == [(first, first + length - 1)], "the chunk, by one request, and no more"
        assert found.encoded == read_chunk_rows(on_disk, chunk, rows).encoded
        assert found.encoded == [image(int(manifest.first_row[chunk]) + row) for row in rows]

    proxy.clear()
    assert build_manifest(store.uri) == manifest and ranges(proxy, ".tar") == [], "the index is kept on this machine"


def test_a_tar_in_object_storage_that_changed_is_told_at_once(remote, monkeypatch):
    folder, store, proxy = remote
    another = SimpleNamespace(sleep=lambda _: pytest.fail("another try is of no use"))
    monkeypatch.setattr(storage, "time", another)
    manifest = build_manifest(store.uri)
    store.write("large.tar", (folder / "small.tar").read_bytes())
    for chunk in (0, 2):  # a range that is cut, and one that begins behind the end
        text = message(read_chunk_rows, manifest, chunk, np.array([0]))
        assert text.startswith("s3://bucket/set/large.tar has changed: of its bytes "), text


def test_an_index_goes_on_after_faults_and_is_the_same(remote, monkeypatch):
    folder, store, proxy = remote
    monkeypatch.setattr(storage, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(tars, "REMOTE_BLOCK_BYTES", 100_000)
    proxy.fault("GET", "large.tar", "cut", times=3, skip=1)
    index = survey.index_manifest(store, survey.find_data(store), "")
    assert proxy.outcomes("GET", "large.tar").count("cut") == 3
    assert index.fingerprint == build_manifest(str(folder)).fingerprint
