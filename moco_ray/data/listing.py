"""What lies in a folder of images: its files, and the footers of its Parquet shards.

Responsible for telling the layouts apart and for every refusal that needs no image read. Not responsible for the
manifest that is made of it (shards.py).
"""

import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlparse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moco_ray.errors import UserError

# More than decode.py reads: a TIFF is listed as a bad row of an unsupported kind, not overlooked in silence.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".avif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
LABEL_NAMES = ("label", "labels", "class", "cls", "target", "fine_label")  # looked for in footers, to warn only


class Found(NamedTuple):
    """Exactly one of the two lists is not empty; relative POSIX names, sorted."""

    images: list[tuple[str, int]]  # name, bytes
    shards: list[str]


class Footer(NamedTuple):
    """What a Parquet file says about its row groups, one element for each."""

    rows: np.ndarray  # int64
    bytes: np.ndarray  # int64: compressed size of the image column
    label_name: str  # the first of LABEL_NAMES that is a column; "" if none
    label_range: list[tuple | None]  # least and greatest label by the statistics; None where not known


def local_folder(uri: str) -> Path:
    """The absolute folder of a path or file:// URI. Raises UserError for another scheme or if there is no folder."""
    parsed = urlparse(uri)
    if not uri:
        raise UserError("data.uri is empty; name the folder that holds the images, for example data.uri=/data/images")
    if "://" in uri and (parsed.scheme != "file" or parsed.netloc not in ("", "localhost")):
        raise UserError(f"{uri}: only local folders are supported yet; copy the data to a local disk and give its path")
    folder = Path(unquote(parsed.path) if "://" in uri else uri).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise UserError(f"{uri} is a file, and a data set is a folder; give the folder that holds it")
        raise UserError(f"{uri} does not exist; check the path")
    return folder.resolve()


def list_images_or_shards(root: Path) -> Found:
    """All image files or all Parquet shards under a folder, names with a leading dot ignored, links followed.

    Raises UserError if there are both or neither, and for a folder of tars, which cannot be read yet.
    """
    files = _files(root)
    images = [(name, size) for name, size in files if name.lower().endswith(IMAGE_SUFFIXES)]
    shards = [name for name, _ in files if name.lower().endswith(".parquet")]
    if images and shards:
        raise UserError(
            f"{root} holds both Parquet shards ({shards[0]}, {len(shards)} in all) and image files ({images[0][0]}, "
            f"{len(images)} in all); a data set is one or the other, so give a folder with only one of them"
        )
    if not images and not shards:
        if any(name.lower().endswith((".tar", ".tar.gz", ".tgz")) for name, _ in files):
            raise UserError(f"{root} holds tar files only, which cannot be read yet; unpack them into a folder")
        raise UserError(
            f"{root} holds {len(files)} files, but no Parquet shards (*.parquet) and no images "
            f"({', '.join('*' + suffix for suffix in IMAGE_SUFFIXES)}); give a folder with one of them"
        )
    return Found(images, shards)


def _files(root: Path) -> list[tuple[str, int]]:
    """(relative POSIX name, bytes) of all visible files, sorted. A folder reached twice by links is an error."""
    found, folders, reached = [], [""], {_identity(root): ""}
    while folders:
        folder = folders.pop()
        try:
            entries = [entry for entry in os.scandir(root / folder) if not entry.name.startswith(".")]
            for entry in entries:
                name = f"{folder}{entry.name}"
                if not name.isprintable() and not _is_text(name):
                    raise UserError(f"{root}: the file name {name!r} is not valid UTF-8; rename it")
                if not entry.is_dir():
                    found.append((name, entry.stat().st_size))
                    continue
                other = reached.setdefault(_identity(entry.path), name)
                if other != name:
                    raise UserError(f"{root}: {name} and {other or '.'} are one folder, by a link; remove the link")
                folders.append(name + "/")
        except OSError as error:
            raise UserError(f"{root / folder} cannot be listed ({error}); repair its links or permissions") from error
    return sorted(found)


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)  # how Python marks undecodable bytes


def _identity(folder: str | Path) -> tuple[int, int]:
    facts = os.stat(folder)
    return facts.st_dev, facts.st_ino


def read_footer(path: Path, image_column: str) -> Footer:
    """Read the footer of one Parquet file. Raises UserError naming it if it is damaged or its image column unfit."""
    try:
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not a readable Parquet file ({reason}); write it again or remove it") from error
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
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [[group.column(index) for index in range(group.num_columns)] for group in groups]
    leaves = f"{image_column}."  # one for a binary column, two for the struct
    sizes = [sum(c.total_compressed_size for c in row if f"{c.path_in_schema}.".startswith(leaves)) for row in columns]
    ranges = [_range(next((c for c in row if label and c.path_in_schema == label), None)) for row in columns]
    return Footer(np.array([g.num_rows for g in groups], np.int64), np.array(sizes, np.int64), label, ranges)


def _range(column) -> tuple | None:
    statistics = column.statistics if column is not None else None
    if statistics is None or not statistics.has_min_max or statistics.null_count:
        return None
    return statistics.min, statistics.max


def sorted_by_class(footers: list[Footer]) -> str:
    """A warning if most rows lie in row groups of one label, by the footers' statistics, and labels differ; or ""."""
    known = [
        (int(rows), span, footer.label_name)
        for footer in footers
        for rows, span in zip(footer.rows, footer.label_range, strict=True)
        if span is not None and rows >= 2  # a single row tells nothing
    ]
    alike = [(rows, span) for rows, span, _ in known if span[0] == span[1]]
    all_rows = sum(int(footer.rows.sum()) for footer in footers)
    if len({span for _, span, _ in known}) < 2 or 2 * sum(rows for rows, _ in alike) < all_rows:
        return ""
    return (
        f"the rows are sorted by class: {len(alike)} of {sum(len(f.rows) for f in footers)} row groups hold a single "
        f"value of {known[0][2]!r}, so batches would mix few classes; pack the data set (moco-ray pack shuffles it)"
    )
