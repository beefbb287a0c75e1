"""What a data set consists of: its layout, its manifest, and the bytes of given rows.

Responsible for telling the layouts apart (Parquet shards; a tree of image files), for the manifest from which
training plans (rows and bytes of each chunk, a fingerprint of the data whatever its address), and for reading the
encoded rows of one chunk. Not responsible for decoding (decode.py), for the order of rows (order.py), nor for
listing a folder (listing.py).

A chunk is what is read at once: one row group of a Parquet file, or one file of a tree.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moco_ray.data.listing import Footer, list_images_or_shards, local_folder, read_footer, sorted_by_class
from moco_ray.errors import UserError

MANIFEST_VERSION = 1
FOOTER_THREADS = 16  # a footer is one short read: waiting, not work


@dataclass(frozen=True, eq=False)
class Manifest:
    """The chunks of a data set, sorted by (relative name, part). Made by `build_manifest` or `Manifest.load`.

    Arrays have one element for each chunk that has rows. Equal data at another address has the same `fingerprint`;
    two manifests are equal if the address is the same too.
    """

    root: str  # the local folder
    layout: Literal["parquet", "tree"]
    image_column: str  # "" for a tree
    names: pa.StringArray  # relative POSIX names of the files that hold rows, sorted
    file: np.ndarray  # int32: index into `names`
    part: np.ndarray  # int32: row group in the file; 0 for a file of a tree
    chunk_rows: np.ndarray  # int64
    chunk_bytes: np.ndarray  # int64: encoded images; compressed column size of a row group, size of a file
    label: np.ndarray  # int32: index into `classes` of a tree's file, -1 without a class folder; -1 for Parquet
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

    def path(self, chunk: int) -> Path:
        """The file of a chunk."""
        return Path(self.root) / self.names[int(self.file[chunk])].as_py()

    def source(self, row: int) -> str:
        """Where a row lies, for people: `train/part-3.parquet row group 7 row 12`, or the name of an image file."""
        chunk, inner = (int(found[0]) for found in self.locate(np.array([row])))
        name = self.names[int(self.file[chunk])].as_py()
        return name if self.layout == "tree" else f"{name} row group {self.part[chunk]} row {inner}"

    def save(self, path: str | Path) -> None:
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
            "label": self.label,
        }
        table = pa.table(columns).replace_schema_metadata({"moco_ray_manifest": json.dumps(facts)})
        pq.write_table(table, path, compression="zstd")

    @classmethod
    def load(cls, path: str | Path) -> "Manifest":
        """Read what `save` wrote. Raises UserError if it is missing, foreign, of another version or damaged."""
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"manifest {path} cannot be read ({_one_line(error)}); build it anew") from error
        facts = json.loads((table.schema.metadata or {}).get(b"moco_ray_manifest", b"{}"))
        if facts.get("version") != MANIFEST_VERSION:
            version = facts.get("version", "none")
            raise UserError(f"{path} is no manifest of version {MANIFEST_VERSION} ({version}); build it anew")
        # Parquet need not keep a dictionary as it was: encoding it again numbers names by first appearance, sorted
        files = table["file"].cast(pa.string()).combine_chunks().dictionary_encode()
        if isinstance(files, pa.ChunkedArray):
            files = files.combine_chunks()
        arrays = [table[column].to_numpy() for column in ("part", "rows", "bytes", "label")]
        found = _manifest(
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
            raise UserError(f"manifest {path} is damaged: its fingerprint is not that of its chunks; build it anew")
        return found


def build_manifest(uri: str, image_column: str) -> Manifest:
    """List a data set and read its footers (in threads), not its images.

    `uri` is a local folder or a file:// URI of one. It holds Parquet shards (*.parquet, found in subfolders too) with
    encoded images in `image_column` (binary, or the Hugging Face struct of bytes and path), or a tree of image files.
    Names that begin with a dot are ignored. Raises UserError, one line, if the folder is missing, holds neither or
    both, or if the column is missing or of another type.
    """
    root = local_folder(uri)
    found = list_images_or_shards(root)
    return _tree_manifest(root, found.images) if found.images else _parquet_manifest(root, found.shards, image_column)


def _tree_manifest(root: Path, images: list[tuple[str, int]]) -> Manifest:
    names = [name for name, _ in images]
    folders = [name.partition("/")[0] if "/" in name else "" for name in names]
    classes = sorted(set(folders) - {""})
    number = {name: index for index, name in enumerate(classes)} | {"": -1}
    labels, sizes = [number[folder] for folder in folders], [size for _, size in images]
    file = np.arange(len(names))
    return _manifest(
        str(root), "tree", "", pa.array(names, pa.string()), file, file * 0, file * 0 + 1, sizes, labels, classes, []
    )


def _parquet_manifest(root: Path, shards: list[str], image_column: str) -> Manifest:
    with ThreadPoolExecutor(FOOTER_THREADS) as threads:
        footers: list[Footer] = list(threads.map(lambda name: read_footer(root / name, image_column), shards))
    kept = [(name, footer) for name, footer in zip(shards, footers, strict=True) if footer.rows.any()]
    if not kept:
        raise UserError(f"the {len(shards)} Parquet shards in {root} hold no rows; give a folder with images")
    full = [np.flatnonzero(footer.rows) for _, footer in kept]  # row groups without rows are no chunks
    file = np.repeat(np.arange(len(kept)), [len(parts) for parts in full])
    rows, sizes = (
        np.concatenate([getattr(f, what)[parts] for (_, f), parts in zip(kept, full, strict=True)])
        for what in ("rows", "bytes")
    )
    warning = sorted_by_class([footer for _, footer in kept])
    return _manifest(
        str(root),
        "parquet",
        image_column,
        pa.array([name for name, _ in kept], pa.string()),
        file,
        np.concatenate(full),
        rows,
        sizes,
        np.full(len(file), -1),
        [],
        [f"{root}: {warning}"] if warning else [],
    )


def _manifest(root, layout, image_column, names, file, part, rows, sizes, label, classes, warnings) -> Manifest:
    """Fix the dtypes and add the fingerprint: the one place that makes a Manifest."""
    arrays = [np.asarray(a, t) for a, t in ((file, np.int32), (part, np.int32), (rows, np.int64), (sizes, np.int64))]
    digest = hashlib.sha256(layout.encode())
    for name in names.to_pylist():
        digest.update(b"\0" + name.encode())
    for array in arrays:
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return Manifest(
        root,
        layout,
        image_column,
        names,
        *arrays,
        np.asarray(label, np.int32),
        tuple(classes),
        tuple(warnings),
        digest.hexdigest()[:16],
    )


class ChunkRows(NamedTuple):
    """Some rows of one chunk, as they lie in the file."""

    encoded: list[bytes]  # a null is b"": no image
    labels: np.ndarray | None  # (rows,) int64, if they were asked for


def read_chunk_rows(
    manifest: Manifest, chunk: int, rows_in_chunk: np.ndarray, label_column: str | None = None
) -> ChunkRows:
    """Read the given rows (N,) of one chunk, in the given order: that row group or file only.

    With a `label_column`, labels come along: that column of Parquet shards (integers), or the class folder of a tree
    (whatever the name). Raises UserError naming the file if it cannot be read or is no longer what the manifest
    says, if the label column is missing, not of integers or null somewhere, or if a tree's file has no class folder.
    """
    path = manifest.path(chunk)
    try:
        if manifest.layout == "tree":
            labels = _folder_labels(manifest, chunk, len(rows_in_chunk)) if label_column else None
            return ChunkRows([path.read_bytes()] * len(rows_in_chunk), labels)
        table = _row_group(manifest, chunk, label_column)
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read ({_one_line(error)}); put it back as it was when the run began, or begin a new run"
        ) from error
    taken = table.take(pa.array(np.asarray(rows_in_chunk, np.int64)))
    images = taken[manifest.image_column]
    if pa.types.is_struct(images.type):
        images = pa.chunked_array([part.field("bytes") for part in images.chunks], type=images.type.field("bytes").type)
    labels = _column_labels(path, taken, label_column) if label_column else None
    return ChunkRows([value or b"" for value in images.to_pylist()], labels)


def _row_group(manifest: Manifest, chunk: int, label_column: str | None) -> pa.Table:
    path, part = manifest.path(chunk), int(manifest.part[chunk])
    with pq.ParquetFile(path, pre_buffer=False) as file:
        names = file.schema_arrow.names
        if label_column and label_column not in names:
            known = ", ".join(names)
            raise UserError(f"{path} has no column {label_column!r}; name one of {known} as evaluation.label_column")
        rows = file.metadata.row_group(part).num_rows if part < file.num_row_groups else 0
        if rows != manifest.chunk_rows[chunk]:
            raise UserError(
                f"{path} has changed since its manifest was built: row group {part} has {rows} rows, not "
                f"{manifest.chunk_rows[chunk]}; put it back, or begin a new run"
            )
        columns = [manifest.image_column, label_column] if label_column else [manifest.image_column]
        return file.read_row_group(part, columns=columns, use_threads=False)


def _folder_labels(manifest: Manifest, chunk: int, rows: int) -> np.ndarray:
    if manifest.label[chunk] < 0:
        raise UserError(f"{manifest.path(chunk)} lies in no class folder; labels of a tree are its first-level folders")
    return np.full(rows, manifest.label[chunk], np.int64)


def _column_labels(path: Path, table: pa.Table, label_column: str) -> np.ndarray:
    column = table[label_column]
    if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        raise UserError(f"{path}: column {label_column!r} is of type {column.type}, not integer; number the classes")
    if column.null_count:
        raise UserError(f"{path}: column {label_column!r} has nulls; every row of an evaluation set needs a label")
    return column.cast(pa.int64()).to_numpy()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
