"""What a data set is made of: its layout by the names that lie there, and the footers of its Parquet shards.

Responsible for telling the layouts apart and for every refusal that needs no image read. Not responsible for the
manifest that is made of it (survey.py), for the index of a tar (tars.py), nor for the storage (storage.py).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moco_ray.data.storage import Entry, Store, one_line
from moco_ray.errors import UserError

# More than decode.py reads: a TIFF is listed as a bad row of an unsupported kind, not overlooked in silence.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".avif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
LABEL_NAMES = ("label", "labels", "class", "cls", "target", "fine_label")  # looked for in footers, to warn only
OURS = "_moco_ray/"  # what `moco-ray pack` writes beside the shards
UNFINISHED = OURS + "unfinished.json"

Layout = Literal["parquet", "tar", "tree"]
SUFFIXES: dict[Layout, tuple[str, ...]] = {"parquet": (".parquet",), "tar": (".tar",), "tree": IMAGE_SUFFIXES}
CALLED: dict[Layout, str] = {"parquet": "Parquet shards", "tar": "tars", "tree": "image files"}


class Found(NamedTuple):
    """A data set by its names alone."""

    layout: Layout
    entries: list[Entry]  # of its shards, tars or images, sorted by name
    others: list[Entry]  # what pack wrote beside them


class Labels(NamedTuple):
    """How the labels of one file lie in its chunks, as far as it is told without reading images."""

    name: str  # of the column or suffix; "" if there is none
    known: int  # chunks of at least two rows whose least and greatest label are known
    alike: int  # of these, chunks that hold a single label
    alike_rows: int
    spans: frozenset  # two of the different (least, greatest) that occur, or fewer if there are fewer


class Index(NamedTuple):
    """The chunks of one shard or tar, one element of each array for each."""

    rows: np.ndarray  # int64
    bytes: np.ndarray  # int64: compressed size of a row group's image column; length of a tar's range
    offset: np.ndarray  # int64: first byte of a tar's range; 0 for Parquet
    labels: Labels
    damage: str  # "", or what is wrong with the rest of the file


def find_data(store: Store) -> Found:
    """List a data set and tell its layout. Names of which a part begins with a dot are ignored.

    Raises UserError if there is nothing, nothing of a known layout, or more than one, and for a data set that is
    still being packed.
    """
    if store.is_local and not Path(store.uri).exists():
        raise UserError(f"{store.uri} does not exist; check the path")
    if store.is_file():
        raise UserError(f"{store.uri} is a file, and a data set is a folder; give the folder that holds it")
    entries = [entry for entry in store.list() if not _hidden(entry.name)]
    others = [entry for entry in entries if f"/{OURS}" in f"/{entry.name}"]
    if unfinished := next((e.name for e in others if f"/{e.name}".endswith(f"/{UNFINISHED}")), None):
        raise UserError(
            f"{store.place(unfinished.removesuffix(UNFINISHED))} is being packed, or its packing was interrupted: run the same `moco-ray pack` again to "
            "complete it"
        )
    by_layout = {
        layout: [e for e in entries if e.name.lower().endswith(suffixes) and f"/{OURS}" not in f"/{e.name}"]
        for layout, suffixes in SUFFIXES.items()
    }
    found = {layout: part for layout, part in by_layout.items() if part}
    if len(found) > 1:
        parts = [f"{CALLED[name]} ({part[0].name}, {len(part)} in all)" for name, part in found.items()]
        raise UserError(
            f"{store.place('')} holds both {' and '.join(parts)}; a data set is of one kind, so give a folder with only one of "
            "them"
        )
    if not found:
        raise _nothing_of_use(store, entries)
    ((layout, part),) = found.items()
    return Found(layout, part, others)


def _hidden(name: str) -> bool:
    return name.startswith(".") or "/." in name


def _nothing_of_use(store: Store, entries: list[Entry]) -> UserError:
    place = store.place("")
    if not entries:
        return UserError(f"nothing lies at {place}; check the name, a bucket's prefix has no wildcards")
    packed = next((e.name for e in entries if e.name.lower().endswith(COMPRESSED_TARS)), None)
    if packed:
        return UserError(
            f"{place} holds compressed tars ({packed}), which cannot be read by range; decompress them (images do not "
            "get smaller by it) into plain .tar files"
        )
    return UserError(
        f"{place} holds {len(entries)} files, but no Parquet shards (*.parquet), no tars (*.tar) and no images "
        f"({', '.join('*' + suffix for suffix in IMAGE_SUFFIXES)}); give a folder with one of them"
    )


def read_footer(store: Store, name: str, image_column: str) -> Index:
    """The row groups of one Parquet file, by its footer. Raises UserError naming it if it is damaged or its image column unfit."""
    metadata = read_metadata(store, name)
    path, schema = store.place(name), metadata.schema.to_arrow_schema()
    if image_column not in schema.names:
        names = ", ".join(schema.names)
        raise UserError(f"{path} has no column {image_column!r}; name one of {names} as data.image_column")
    kind = schema.field(image_column).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise UserError(
            f"{path}: column {image_column!r} is of type {kind}, not encoded images; it must be binary, or a struct "
            f"with a binary field 'bytes'; name another column as data.image_column or write the files' bytes into it"
        )
    label = next((name for name in LABEL_NAMES if name in schema.names), "")
    # The columns of a file are the same in each of its row groups.
    first = metadata.row_group(0) if metadata.num_row_groups else None
    paths = [first.column(index).path_in_schema for index in range(metadata.num_columns)] if first else []
    image = [i for i, path in enumerate(paths) if f"{path}.".startswith(f"{image_column}.")]  # two of a struct
    labels = paths.index(label) if label in paths else None
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    sizes = [sum(group.column(i).total_compressed_size for i in image) for group in groups]
    ranges = [_range(group.column(labels)) if labels is not None else None for group in groups]
    rows = np.array([group.num_rows for group in groups], np.int64)
    return Index(rows, np.array(sizes, np.int64), np.zeros(len(rows), np.int64), labels_of(label, rows, ranges), "")


def read_metadata(store: Store, name: str) -> pq.FileMetaData:
    """The footer of a Parquet file as it is. Raises UserError naming a file that cannot be read or is none."""

    def call() -> pq.FileMetaData:
        with store.open(name) as file, damage_told(), pq.ParquetFile(file) as parquet:
            return parquet.metadata

    try:
        return store.attempt("read", name, call)
    except pa.ArrowException as error:
        raise not_parquet(store, name, error) from error


@contextlib.contextmanager
def damage_told() -> Iterator[None]:
    """pyarrow calls damage to a Parquet file an error of input and output, as if another try might help."""
    try:
        yield
    except OSError as error:
        if "thrift" in str(error) or "page header" in str(error):
            raise pa.ArrowInvalid(one_line(error)) from error
        raise


def not_parquet(store: Store, name: str, error: Exception) -> UserError:
    return UserError(
        f"{store.place(name)} is not a readable Parquet file ({one_line(error)}); write it again or remove it"
    )


def _range(column: pq.ColumnChunkMetaData) -> tuple | None:
    statistics = column.statistics
    if statistics is None or not statistics.has_min_max or statistics.null_count:
        return None
    return statistics.min, statistics.max


def labels_of(name: str, rows: np.ndarray, ranges: list[tuple | None]) -> Labels:
    """Sum up the (least, greatest) label of each chunk; None where it is not known."""
    known = [(int(count), span) for count, span in zip(rows, ranges, strict=True) if span is not None and count >= 2]
    alike = [count for count, span in known if span[0] == span[1]]  # a single row tells nothing
    return Labels(name, len(known), len(alike), sum(alike), frozenset(sorted({span for _, span in known})[:2]))


def sorted_by_class(indexes: list[Index]) -> str:
    """A warning if most rows lie in chunks of one label, and labels differ; or ""."""
    alike_rows = sum(index.labels.alike_rows for index in indexes)
    spans = frozenset().union(*(index.labels.spans for index in indexes))
    if len(spans) < 2 or 2 * alike_rows < sum(int(index.rows.sum()) for index in indexes):
        return ""
    name = next(index.labels.name for index in indexes if index.labels.name)
    return (
        f"the rows are sorted by class: {sum(index.labels.alike for index in indexes)} of "
        f"{sum(len(index.rows) for index in indexes)} row groups hold a single value of {name!r}, so batches would mix "
        "few classes; pack the data set (moco-ray pack shuffles it)"
    )
