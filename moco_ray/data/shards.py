"""What a data set consists of: its manifest, and the bytes of given rows.

Responsible for the manifest from which training plans (rows and bytes of each chunk, a fingerprint of the data whatever
its address), and for reading the encoded rows of one chunk. Not responsible for decoding (decode.py), for the order
of rows (order.py), nor for making a manifest (survey.py).

A chunk is what is read at once, by range: one row group of a Parquet file, a run of about 128 samples of a tar, or one
file of a tree. A manifest takes 44 bytes for each chunk and the names of the files: by that 0.35 MB for a million rows in row
groups of 128, and about 90 MB for a million files of a tree with names of 40 letters.
"""

import hashlib
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moco_ray.data.listing import Layout, damage_told, not_parquet
from moco_ray.data.storage import Store, one_line
from moco_ray.data.tars import Sample, changed, label_of, read_samples
from moco_ray.errors import UserError

MANIFEST_VERSION = 2
FOOTERS_KEPT = 32


@dataclass(frozen=True, eq=False)
class Manifest:
    """The chunks of a data set, sorted by (relative name, part). Made by survey.py or `Manifest.load`.

    Arrays have one element for each chunk that has rows. Equal data at another address has the same `fingerprint`;
    two manifests are equal if the address is the same too.
    """

    root: str  # the URI of its store
    layout: Layout
    image_column: str  # "" but for Parquet
    names: pa.StringArray  # relative POSIX names of the files that hold rows, sorted
    file: np.ndarray  # int32: index into `names`
    part: np.ndarray  # int32: row group in the file, run of samples in the tar; 0 for a file of a tree
    chunk_rows: np.ndarray  # int64
    chunk_bytes: np.ndarray  # int64: compressed column size of a row group, length of a tar's range, size of a file
    offset: np.ndarray  # int64: first byte of a tar's range; 0 for the other layouts
    label: np.ndarray  # int32: index into `classes` of a tree's file, -1 without a class folder; -1 otherwise
    classes: tuple[str, ...]  # first-level folders of a tree that hold images, sorted; an empty folder is no class
    warnings: tuple[str, ...]  # one line each, for the user
    fingerprint: str  # SHA-256 over layout, names, rows and bytes as 16 hex digits: not the address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and (self.root, self.fingerprint) == (other.root, other.fingerprint)

    def __hash__(self) -> int:
        return hash((self.root, self.fingerprint))

    @property
    def rows(self) -> int:
        return int(self.first_row[-1])

    @cached_property
    def first_row(self) -> np.ndarray:
        """(chunks + 1,) int64: number of each chunk's first row, then the number of rows of all."""
        return np.concatenate([[0], np.cumsum(self.chunk_rows, dtype=np.int64)])

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For row numbers (N,) int64: their chunks (N,) int64 and their rows within the chunk (N,) int64."""
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and not (0 <= rows.min() and rows.max() < self.rows):
            raise IndexError(f"row numbers {rows.min()}..{rows.max()}: the manifest has {self.rows} rows")
        chunk = np.searchsorted(self.first_row, rows, side="right") - 1
        return chunk, rows - self.first_row[chunk]

    @property
    def store(self) -> Store:
        return Store(self.root)

    def at(self, store: Store) -> "Manifest":
        """The same chunks at another address."""
        return replace(self, root=store.uri)

    def name(self, chunk: int) -> str:
        """The file of a chunk, below the store."""
        return self.names[int(self.file[chunk])].as_py()

    def source(self, row: int) -> str:
        """Where a row lies, for people: `train/part-3.parquet row group 7 row 12`, `a.tar part 7 row 12`, or the name of an
        image file."""
        chunk, inner = (int(found[0]) for found in self.locate(np.array([row])))
        if self.layout == "tree":
            return self.name(chunk)
        return f"{self.name(chunk)} {'row group' if self.layout == 'parquet' else 'part'} {self.part[chunk]} row {inner}"

    def save(self, path: str | Path | pa.NativeFile) -> None:
        """Write one Parquet file that `load` reads."""
        facts = {
            "version": MANIFEST_VERSION,
            "root": self.root,
            "layout": self.layout,
            "fingerprint": self.fingerprint,
            "image_column": self.image_column,
            "classes": self.classes,
            "warnings": self.warnings,
        }
        columns = {
            "file": pa.DictionaryArray.from_arrays(pa.array(self.file), self.names),
            "part": self.part,
            "rows": self.chunk_rows,
            "bytes": self.chunk_bytes,
            "offset": self.offset,
            "label": self.label,
        }
        table = pa.table(columns).replace_schema_metadata({"moco_ray_manifest": json.dumps(facts)})
        pq.write_table(table, path, compression="zstd")

    @classmethod
    def load(cls, path: str | Path | pa.NativeFile, name: str = "") -> "Manifest":
        """Read what `save` wrote. Raises UserError if it is missing, foreign, of another version or damaged.

        `name` is what messages call it, if `path` is an open file.
        """
        name = name or str(path)
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"manifest {name} cannot be read ({one_line(error)}); build it anew") from error
        facts = json.loads((table.schema.metadata or {}).get(b"moco_ray_manifest", b"{}"))
        if facts.get("version") not in (1, MANIFEST_VERSION):
            version = facts.get("version", "none")
            raise UserError(f"{name} is no manifest of version {MANIFEST_VERSION} ({version}); build it anew")
        # Parquet need not keep a dictionary as it was: encoding it again numbers names by first appearance, sorted
        files = table["file"].cast(pa.string()).combine_chunks().dictionary_encode()
        if isinstance(files, pa.ChunkedArray):
            files = files.combine_chunks()
        if facts["version"] == 1:  # before there were tars
            table = table.append_column("offset", pa.array(np.zeros(len(table), np.int64)))
        arrays = [table[column].to_numpy() for column in ("part", "rows", "bytes", "offset", "label")]
        found = make_manifest(
            facts["root"],
            facts["layout"],
            facts["image_column"],
            files.dictionary,
            files.indices.to_numpy(),
            *arrays,
            facts["classes"],
            facts["warnings"],
        )
        if found.fingerprint != facts["fingerprint"]:
            raise UserError(f"manifest {name} is damaged: its fingerprint is not that of its chunks; build it anew")
        return found


def make_manifest(root, layout, image_column, names, file, part, rows, sizes, offset, label, classes, warnings) -> Manifest:
    """Fix the dtypes and add the fingerprint: the one place that makes a Manifest."""
    arrays = [np.asarray(a, t) for a, t in ((file, np.int32), (part, np.int32), (rows, np.int64), (sizes, np.int64))]
    digest = hashlib.sha256(layout.encode())
    for name in _strings(names):
        digest.update(b"\0" + name.encode())
    for array in arrays:
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return Manifest(
        root,
        layout,
        image_column,
        names,
        *arrays,
        np.asarray(offset, np.int64),
        np.asarray(label, np.int32),
        tuple(classes),
        tuple(warnings),
        digest.hexdigest()[:16],
    )


def _strings(names: pa.StringArray) -> Iterable[str]:
    """Some at a time: all of them as Python's would take gigabytes for a large tree."""
    for first in range(0, len(names), 65536):
        yield from names[first : first + 65536].to_pylist()


class ChunkRows(NamedTuple):
    """Some rows of one chunk, as they lie in the file."""

    encoded: list[bytes]  # a null is b"": no image
    labels: np.ndarray | None  # (rows,) int64, if they were asked for


def read_chunk_rows(
    manifest: Manifest, chunk: int, rows_in_chunk: np.ndarray, label_column: str | None = None
) -> ChunkRows:
    """Read some rows (N,) int64 of one chunk, in the order given, by range.

    With a `label_column`, labels come along: that column of Parquet shards (integers), the `.cls` of a tar's sample or
    `label_column` in its `.json`, or the class folder of a tree (whatever the name). Raises UserError naming the file if
    it cannot be read or is no longer what the manifest says, or if a label is missing or no integer.
    """
    inner = np.asarray(rows_in_chunk, np.int64)
    if manifest.layout == "tree":
        labels = _folder_labels(manifest, chunk, len(inner)) if label_column else None
        return ChunkRows([manifest.store.read(manifest.name(chunk))] * len(inner), labels)
    if manifest.layout == "tar":
        samples = samples_of(manifest, chunk)
        labels = _sample_labels(manifest, chunk, samples, label_column)[inner] if label_column else None
        return ChunkRows([samples[row].image for row in inner.tolist()], labels)
    columns = [manifest.image_column, *([label_column] if label_column else [])]
    taken = row_group(manifest, chunk, columns).take(pa.array(inner))
    labels = _column_labels(manifest.store.place(manifest.name(chunk)), taken, label_column) if label_column else None
    return ChunkRows(image_bytes(taken[manifest.image_column]), labels)


def read_chunk_labels(manifest: Manifest, chunk: int, label_column: str) -> np.ndarray:
    """The labels of all rows of one chunk, (rows,) int64, without its images where the layout allows: a tar is read whole.

    Raises UserError as `read_chunk_rows` does.
    """
    if manifest.layout == "tree":
        return _folder_labels(manifest, chunk, int(manifest.chunk_rows[chunk]))
    if manifest.layout == "tar":
        return _sample_labels(manifest, chunk, samples_of(manifest, chunk), label_column)
    return _column_labels(manifest.store.place(manifest.name(chunk)), row_group(manifest, chunk, [label_column]), label_column)


def samples_of(manifest: Manifest, chunk: int) -> list[Sample]:
    """All rows of a tar's chunk. Raises UserError if they are not as many as they were."""
    name, length = manifest.name(chunk), int(manifest.chunk_bytes[chunk])
    samples = read_samples(manifest.store, name, int(manifest.offset[chunk]), length)
    if len(samples) != manifest.chunk_rows[chunk]:
        how = f"part {manifest.part[chunk]} holds {len(samples)} images, not {manifest.chunk_rows[chunk]}"
        raise changed(manifest.store, name, how)
    return samples


def image_bytes(column: pa.ChunkedArray) -> list[bytes]:
    """The encoded images of a binary or struct column; a null is b""."""
    if pa.types.is_struct(column.type):
        column = pa.chunked_array(
            [part.field("bytes") for part in column.chunks], type=column.type.field("bytes").type
        )
    return [value or b"" for value in column.to_pylist()]


def row_group(manifest: Manifest, chunk: int, columns: list[str]) -> pa.Table:
    """Some columns of a Parquet chunk, by range. Raises UserError naming the file, and a column that it does not have."""
    store, name, part = manifest.store, manifest.name(chunk), int(manifest.part[chunk])

    def call() -> pa.Table:
        with store.open(name) as file, damage_told():
            parquet = _with_footer(store, name, file)
            _refuse_other_columns(store.place(name), parquet, columns, manifest.image_column)
            rows = parquet.metadata.row_group(part).num_rows if part < parquet.num_row_groups else 0
            if rows != manifest.chunk_rows[chunk]:
                raise changed(store, name, f"row group {part} has {rows} rows, not {manifest.chunk_rows[chunk]}")
            return parquet.read_row_group(part, columns=columns, use_threads=False)

    try:
        return store.attempt("read", name, call)
    except pa.ArrowException as error:
        raise not_parquet(store, name, error) from error


def _with_footer(store: Store, name: str, file: pa.NativeFile) -> pq.ParquetFile:
    """A Parquet file whose footer is read once: a segment takes several row groups of a shard one after the other."""
    key = (store, name, file.size())
    parquet = pq.ParquetFile(file, metadata=_footers.get(key), pre_buffer=True)
    with _footers_lock:
        _footers[key] = parquet.metadata
        while len(_footers) > FOOTERS_KEPT:
            _footers.pop(next(iter(_footers)))  # the oldest
    return parquet


_footers: dict[tuple[Store, str, int], pq.FileMetaData] = {}  # of this process
_footers_lock = threading.Lock()


def _refuse_other_columns(place: str, parquet: pq.ParquetFile, columns: list[str], image_column: str) -> None:
    names = parquet.schema_arrow.names
    for column in columns:
        if column not in names:
            where = "data.image_column" if column == image_column else "evaluation.label_column"
            raise UserError(f"{place} has no column {column!r}; name one of {', '.join(names)} as {where}")


def _folder_labels(manifest: Manifest, chunk: int, rows: int) -> np.ndarray:
    if manifest.label[chunk] < 0:
        place = manifest.store.place(manifest.name(chunk))
        raise UserError(f"{place} lies in no class folder; labels of a tree are its first-level folders")
    return np.full(rows, manifest.label[chunk], np.int64)


def _sample_labels(manifest: Manifest, chunk: int, samples: list[Sample], label_column: str) -> np.ndarray:
    labels = [label_of(sample, label_column) for sample in samples]
    if None in labels:
        key, place = samples[labels.index(None)].key, manifest.store.place(manifest.name(chunk))
        raise UserError(
            f"{place}: sample {key} has no integer label: no .cls, and no {label_column!r} in a .json; every row of an "
            "evaluation set needs one"
        )
    return np.array(labels, np.int64)


def _column_labels(path: str, table: pa.Table, label_column: str) -> np.ndarray:
    column = table[label_column]
    if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        raise UserError(f"{path}: column {label_column!r} is of type {column.type}, not integer; number the classes")
    if column.null_count:
        raise UserError(f"{path}: column {label_column!r} has nulls; every row of an evaluation set needs a label")
    return column.cast(pa.int64()).to_numpy()
