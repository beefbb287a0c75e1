"""Layouts, the manifest and the rows of a chunk, on real Parquet files and real folders."""

import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moco_ray.data.shards import Manifest, read_chunk_rows
from moco_ray.data.survey import build_manifest
from moco_ray.errors import UserError


def image(number: int) -> bytes:
    """Stands for an encoded image: nothing here decodes."""
    return b"image %d " % number * (number % 5 + 1)


def write_shard(path, numbers, row_group_size=4, column="image", **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: [image(i) for i in numbers], **more}), path, row_group_size=row_group_size)


def write_tree(root, names):
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(image(number))


@pytest.fixture
def shards(tmp_path):
    """Two shards in two folders, of 10 and 7 rows, in row groups of 4, with labels."""
    root = tmp_path / "shards"
    write_shard(root / "b.parquet", range(10), label=[i % 3 for i in range(10)])
    write_shard(root / "a" / "more.PARQUET", range(10, 17), label=[i % 3 for i in range(10, 17)])
    return root


def message(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_manifest_of_shards_has_one_chunk_for_each_row_group_sorted_by_name(shards):
    manifest = build_manifest(str(shards), "image")
    assert manifest.layout == "parquet" and manifest.rows == 17
    assert [manifest.names[f].as_py() for f in manifest.file] == ["a/more.PARQUET"] * 2 + ["b.parquet"] * 3
    assert manifest.part.tolist() == [0, 1, 0, 1, 2] and manifest.chunk_rows.tolist() == [4, 3, 4, 4, 2]
    assert manifest.first_row.tolist() == [0, 4, 7, 11, 15, 17] and (manifest.chunk_bytes > 0).all()
    assert manifest.source(12) == "b.parquet row group 1 row 1"


def test_a_manifest_of_a_tree_has_one_chunk_for_each_image_file_whatever_its_case(tmp_path):
    names = ["cat/1.JPG", "cat/deep/2.jpeg", "dog/3.png", "dog/4.WebP", "5.gif", "ant/6.bmp"]
    write_tree(tmp_path, [*names, ".hidden/7.png", "cat/.8.png", "readme.txt"])
    (tmp_path / "empty class").mkdir()
    manifest = build_manifest(f"file://{tmp_path}", "")
    assert manifest.names.to_pylist() == sorted(names) and manifest.rows == len(names)
    assert manifest.classes == ("ant", "cat", "dog"), "a folder without images is no class"
    assert manifest.label.tolist() == [-1, 0, 1, 1, 2, 2]
    assert manifest.chunk_bytes.tolist() == [os.path.getsize(tmp_path / name) for name in sorted(names)]
    assert manifest.source(0) == "5.gif"


def test_rows_of_a_chunk_come_in_the_order_asked_for_with_their_labels(shards):
    manifest = build_manifest(str(shards), "image")
    found = read_chunk_rows(manifest, 3, np.array([3, 0, 3]), "label")  # rows 4..7 of b.parquet
    assert found.encoded == [image(7), image(4), image(7)] and found.labels.tolist() == [1, 1, 1]
    assert read_chunk_rows(manifest, 1, np.array([2])) == ([image(16)], None)


def test_every_row_number_leads_to_its_image(shards):
    manifest = build_manifest(str(shards), "image")
    chunks, inner = manifest.locate(np.arange(17))
    read = [read_chunk_rows(manifest, c, np.array([i])).encoded[0] for c, i in zip(chunks, inner, strict=True)]
    assert read == [image(i) for i in [*range(10, 17), *range(10)]]
    with pytest.raises(IndexError, match="the manifest has 17 rows"):
        manifest.locate(np.array([17]))


def test_the_hugging_face_struct_and_large_binary_are_image_columns_too(tmp_path):
    structs = [{"bytes": image(0), "path": "x.png"}, {"bytes": None, "path": "y"}, {"bytes": image(2), "path": None}]
    pq.write_table(pa.table({"image": structs}), tmp_path / "struct.parquet")
    pq.write_table(pa.table({"image": pa.array([image(3)], pa.large_binary())}), tmp_path / "wide.parquet")
    manifest = build_manifest(str(tmp_path), "image")
    assert read_chunk_rows(manifest, 0, np.arange(3)).encoded == [image(0), b"", image(2)], "a null is no image"
    assert read_chunk_rows(manifest, 1, np.array([0])).encoded == [image(3)]
    assert (manifest.chunk_bytes > 0).all()


def test_row_groups_and_shards_without_rows_are_no_chunks_and_other_parts_keep_their_number(tmp_path):
    schema = pa.schema({"image": pa.binary()})
    with pq.ParquetWriter(tmp_path / "b.parquet", schema) as writer:
        for rows in (2, 0, 3):
            writer.write_table(pa.table({"image": [image(i) for i in range(rows)]}, schema=schema))
    pq.write_table(pa.table({"image": []}, schema=schema), tmp_path / "a.parquet")
    manifest = build_manifest(str(tmp_path), "image")
    assert manifest.names.to_pylist() == ["b.parquet"] and manifest.chunk_rows.tolist() == [2, 3]
    assert read_chunk_rows(manifest, 1, np.array([2])).encoded == [image(2)]
    os.remove(tmp_path / "b.parquet")
    assert "hold no rows" in message(build_manifest, str(tmp_path), "image")


def test_the_fingerprint_is_of_the_data_and_not_of_its_address(shards, tmp_path):
    first = build_manifest(str(shards), "image")
    copy = build_manifest(shutil.copytree(shards, tmp_path / "elsewhere").as_posix(), "image")
    assert copy.fingerprint == first.fingerprint and copy.root != first.root and copy != first
    assert first == build_manifest(str(shards), "image")
    os.rename(tmp_path / "elsewhere/b.parquet", tmp_path / "elsewhere/c.parquet")
    renamed = build_manifest(str(tmp_path / "elsewhere"), "image").fingerprint
    write_shard(shards / "b.parquet", range(1, 11), label=[0] * 10)
    changed = build_manifest(str(shards), "image").fingerprint
    assert len({first.fingerprint, renamed, changed}) == 3


@pytest.mark.parametrize("layout", ["shards", "tree"])
def test_a_saved_manifest_is_read_back_equal(layout, shards, tmp_path):
    if layout == "tree":
        write_tree(tmp_path / "tree", ["b/1.png", "a/2.png", "3.png"])
    built = build_manifest(str(tmp_path / layout), "image")
    built.save(tmp_path / "manifest.parquet")
    loaded = Manifest.load(tmp_path / "manifest.parquet")
    for name, value in vars(built).items():
        read = getattr(loaded, name)
        assert np.array_equal(value, read) if isinstance(value, np.ndarray) else value == read, name
    assert loaded.file.dtype == np.int32 and loaded == built


def test_a_manifest_that_is_missing_foreign_or_damaged_is_refused(shards, tmp_path):
    path = tmp_path / "manifest.parquet"
    assert f"manifest {path} cannot be read" in message(Manifest.load, path)
    assert "is no manifest of version 2 (none); build it anew" in message(Manifest.load, shards / "b.parquet")
    build_manifest(str(shards), "image").save(path)
    table = pq.read_table(path)
    pq.write_table(table.set_column(2, "rows", pa.array([4, 3, 4, 4, 3])), path)
    assert "is damaged: its fingerprint is not that of its chunks" in message(Manifest.load, path)


def test_a_folder_that_is_no_data_set_is_refused_with_the_cure(shards, tmp_path):
    assert "no data set is named" in message(build_manifest, "", "image")
    assert "nowhere does not exist; check the path" in message(build_manifest, str(tmp_path / "nowhere"), "image")
    assert "is a file, and a data set is a folder" in message(build_manifest, str(shards / "b.parquet"), "image")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.txt").touch()
    text = message(build_manifest, str(tmp_path / "none"), "x")
    assert "holds 1 files, but no Parquet shards (*.parquet), no tars (*.tar) and no images" in text
    (tmp_path / "none" / "train-0.tar.gz").touch()
    assert "holds compressed tars (train-0.tar.gz), which cannot be read by range" in message(build_manifest, str(tmp_path / "none"), "x")
    write_tree(shards, ["cat/1.png"])
    text = message(build_manifest, str(shards), "image")
    assert "holds both Parquet shards (a/more.PARQUET, 2 in all) and image files (cat/1.png, 1 in all)" in text


def test_a_shard_that_does_not_fit_is_refused_by_name(shards):
    assert "has no column 'picture'; name one of image, label as data.image_column" in message(
        build_manifest, str(shards), "picture"
    )
    assert "column 'label' is of type int64, not encoded images" in message(build_manifest, str(shards), "label")
    (shards / "c.parquet").write_bytes(b"PAR1 and then nothing")
    text = message(build_manifest, str(shards), "image")
    assert "c.parquet is not a readable Parquet file" in text and "write it again or remove it" in text


def test_a_link_to_a_folder_is_followed_and_a_loop_of_links_is_refused(tmp_path):
    write_tree(tmp_path / "real", ["1.png"])
    (tmp_path / "tree").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "tree" / "cat")
    assert build_manifest(str(tmp_path / "tree"), "").names.to_pylist() == ["cat/1.png"]
    os.symlink(tmp_path / "tree", tmp_path / "real" / "loop")
    assert "cat/loop and . are one folder, by a link" in message(build_manifest, str(tmp_path / "tree"), "")


def test_a_file_that_changes_or_vanishes_after_the_listing_is_an_error_that_names_it(shards, tmp_path):
    manifest, row = build_manifest(str(shards), "image"), np.array([0])
    write_shard(shards / "b.parquet", range(9))
    assert "b.parquet has changed since its manifest was built (row group 2 has 1 rows, not 2)" in message(
        read_chunk_rows, manifest, 4, row
    )
    os.remove(shards / "b.parquet")
    assert "b.parquet cannot be read" in message(read_chunk_rows, manifest, 2, row)
    write_tree(tmp_path / "tree", ["cat/1.png"])
    tree = build_manifest(str(tmp_path / "tree"), "")
    os.remove(tmp_path / "tree/cat/1.png")
    assert "cat/1.png cannot be read" in message(read_chunk_rows, tree, 0, row)


def test_labels_that_are_missing_or_no_integers_are_an_error(shards, tmp_path):
    manifest, row = build_manifest(str(shards), "image"), np.array([0])
    assert "has no column 'kind'; name one of image, label as evaluation.label_column" in message(
        read_chunk_rows, manifest, 0, row, "kind"
    )
    write_shard(tmp_path / "words" / "a.parquet", range(2), label=["cat", "dog"], gap=[1, None])
    words = build_manifest(str(tmp_path / "words"), "image")
    text = message(read_chunk_rows, words, 0, row, "label")
    assert "column 'label' is of type string, not integer; number the classes" in text
    assert "column 'gap' has nulls" in message(read_chunk_rows, words, 0, np.array([0, 1]), "gap")
    write_tree(tmp_path / "tree", ["1.png", "cat/2.png"])
    tree = build_manifest(str(tmp_path / "tree"), "")
    assert "1.png lies in no class folder" in message(read_chunk_rows, tree, 0, row, "label")
    assert read_chunk_rows(tree, 1, row, "label").labels.tolist() == [0]


def test_shards_sorted_by_class_are_warned_of_and_shuffled_or_unlabelled_ones_are_not(tmp_path):
    kinds = {"sorted": [i // 8 for i in range(32)], "mixed": [i * 7 % 10 for i in range(32)], "one": [7] * 32}
    for name, labels in kinds.items():
        write_shard(tmp_path / name / "a.parquet", range(32), row_group_size=8, label=labels)
    write_shard(tmp_path / "bare" / "a.parquet", range(32))
    (warning,) = build_manifest(str(tmp_path / "sorted"), "image").warnings
    assert "sorted by class: 4 of 4 row groups hold a single value of 'label'" in warning and "moco-ray pack" in warning
    for name in ("mixed", "one", "bare"):
        assert build_manifest(str(tmp_path / name), "image").warnings == ()


def test_damage_in_a_footer_or_a_page_is_told_as_damage_and_not_as_sick_storage(tmp_path):
    write_shard(tmp_path / "a.parquet", range(40), row_group_size=40)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    manifest = build_manifest(str(tmp_path), "image")
    page = bytes(content[:4]) + b"\xff" * 24 + bytes(content[28:])
    (tmp_path / "a.parquet").write_bytes(page)
    assert "a.parquet is not a readable Parquet file (" in message(read_chunk_rows, manifest, 0, np.array([0]))
    size = int.from_bytes(content[-8:-4], "little")
    content[-8 - size : -8 - size + 20] = b"\xff" * 20
    (tmp_path / "a.parquet").write_bytes(content)
    assert "a.parquet is not a readable Parquet file (" in message(build_manifest, str(tmp_path), "image")


def test_what_pack_wrote_in_a_subfolder_is_no_data_and_an_unfinished_one_is_refused_there_too(shards):
    before = build_manifest(str(shards), "image")
    write_shard(shards / "a" / "_moco_ray" / "manifest.parquet", range(3))
    assert build_manifest(str(shards), "image").fingerprint == before.fingerprint
    (shards / "a" / "_moco_ray" / "unfinished.json").touch()
    assert "/shards/a/ is being packed, or its packing was interrupted" in message(build_manifest, str(shards), "image")
