"""The passes of `moco-ray pack`: what one task of each does. No Ray here.

Responsible for the job (options, tasks, shards), for reading, checking and placing rows, for finding duplicates, and for
writing a shard. Not responsible for carrying the tasks (pack.py) nor for one image (reencode.py).
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.parquet as pq

from moco_ray.data.decode import BadImage, decode
from moco_ray.data.draws import PACK, uniforms
from moco_ray.data.listing import LABEL_NAMES, OURS, read_metadata
from moco_ray.data.reencode import as_baseline, is_progressive, smaller, transform_version
from moco_ray.data.shards import Manifest, image_bytes, row_group, samples_of
from moco_ray.data.slices import Parts, joined, side_by_side
from moco_ray.data.storage import Store
from moco_ray.data.tars import label_of
from moco_ray.errors import UserError
from moco_ray.recipe import Data

FORMAT = 1
PARTS = OURS + "parts/"
SHARD = "part-{:05d}.parquet"
ROW_GROUP_ROWS = 128
DIGEST = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8")])  # 128 bits of the source's bytes


@dataclass(frozen=True)
class PackOptions:
    """What is asked of a packed data set. Any other value gives other shards."""

    image_column: str = "image"  # of a Parquet source
    label_column: str | None = None  # None: the first of LABEL_NAMES that there is; "": no labels
    seed: int = 0
    drop_duplicates: bool = False  # keep the first of images that are equal byte for byte
    short_side: int | None = None  # re-encode larger images to this: lossy
    quality: int = 90  # of that JPEG
    max_image_pixels: int = Data().max_image_pixels
    shard_bytes: int = 256 << 20  # of the source, as are the next two
    task_bytes: int = 128 << 20
    task_rows: int = 20_000
    bucket_rows: int = 4_000_000  # whose digests one process compares

    def __post_init__(self):
        least = {"seed": 0, "max_image_pixels": 1, "shard_bytes": 1, "task_bytes": 1, "task_rows": 1, "bucket_rows": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {value}")
        if self.short_side is not None and self.short_side < 1:
            raise UserError(f"the short side is {self.short_side} pixels; give at least 1, for example 256")
        if not 1 <= self.quality <= 100:
            raise UserError(f"the JPEG quality is {self.quality}; it must be 1 to 100")


class Columns(NamedTuple):
    """What is kept of a source beside its images."""

    label: str  # name of the column, or of the field of a tar's .json; "" if none
    kind: str  # "int64" or "string"
    id: str  # a column of Parquet; "" if ids are made of the places of rows


@dataclass(frozen=True, eq=False)
class Job:
    """What all tasks share. Made by `plan`: a function of the source, the options and the software."""

    manifest: Manifest
    target: Store
    options: PackOptions
    columns: Columns
    cuts: np.ndarray  # (tasks + 1,) int64: first chunk of each scatter task, then the number of chunks
    shards: int
    buckets: int
    identity: dict[str, Any]  # two jobs of one identity write the same bytes

    @property
    def schema(self) -> pa.Schema:
        """Of the packed shards."""
        about = {"format": FORMAT, "classes": self.manifest.classes}
        fields = [("image", pa.binary()), ("label", getattr(pa, self.columns.kind)()), ("id", pa.string())]
        return pa.schema(fields).with_metadata({"moco_ray_pack": json.dumps(about)})

    def place(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The uniforms of rows (N,) int64 of the source, (N,) float64, and their target shards, (N,) int64."""
        keys = uniforms(self.options.seed, 0, rows, 0, PACK, 1)[:, 0]
        return keys, (keys * self.shards).astype(np.int64)


def plan(manifest: Manifest, target: Store, options: PackOptions) -> Job:
    """Cut the work into tasks. Reads one footer of a Parquet source. Raises UserError for an unfit label column."""
    columns, size = _columns(manifest, options), int(manifest.chunk_bytes.sum())
    facts = {"format": FORMAT, "source": manifest.fingerprint, **asdict(options), "columns": columns._asdict()}
    return Job(
        manifest,
        target,
        options,
        columns,
        _cuts(manifest, options),
        max(1, -(-size // options.shard_bytes)),
        -(-manifest.rows // options.bucket_rows),
        {**facts, "versions": versions()},
    )


def _cuts(manifest: Manifest, options: PackOptions) -> np.ndarray:
    cuts, size, rows = [0], 0, 0
    for chunk, (more, count) in enumerate(
        zip(manifest.chunk_bytes.tolist(), manifest.chunk_rows.tolist(), strict=True)
    ):
        if chunk > cuts[-1] and (size + more > options.task_bytes or rows + count > options.task_rows):
            cuts.append(chunk)
            size = rows = 0
        size, rows = size + more, rows + count
    return np.array([*cuts, len(manifest.chunk_rows)], np.int64)


def versions() -> dict[str, str]:
    """Of what writes the bytes."""
    return {"pyarrow": pa.__version__, "pillow": PIL.__version__, "turbojpeg": transform_version()}


def _columns(manifest: Manifest, options: PackOptions) -> Columns:
    name = options.label_column
    if manifest.layout != "parquet":
        return Columns("label" if name is None else name, "int64", "")
    schema = read_metadata(manifest.store, manifest.name(0)).schema.to_arrow_schema()
    key = "id" if "id" in schema.names and _kind(schema.field("id").type) else ""
    found = next((label for label in LABEL_NAMES if label in schema.names), "") if name is None else name
    if not found:
        return Columns("", "int64", key)
    place = manifest.store.place(manifest.name(0))
    if found not in schema.names:
        raise UserError(f"{place} has no column {found!r}; name one of {', '.join(schema.names)} as the label column")
    kind = schema.field(found).type
    if not _kind(kind):
        raise UserError(
            f"{place}: column {found!r} is of type {kind}, and labels are integers or strings; name another label column, "
            "or '' for none"
        )
    return Columns(found, _kind(kind), key)


def _kind(kind: pa.DataType) -> str:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return "int64" if pa.types.is_integer(kind) or pa.types.is_boolean(kind) else "string" if text else ""


def scatter(job: Job, task: int) -> dict[str, Any]:
    """Read a run of chunks and write its rows for each target shard, and their digests for each bucket."""
    first, stop = job.cuts[task : task + 2].tolist()
    counts, bad, kept = Counter(), [], {name: [] for name in ("image", "label", "id", "row", "digest")}
    row = int(job.manifest.first_row[first])
    for rows in side_by_side(partial(_source_rows, job), range(first, stop)):
        for encoded, label, name in rows:
            counts["source_bytes"] += len(encoded)
            try:
                image, what = _prepared(encoded, job.options)
            except BadImage as error:
                bad.append(
                    {"row": row, "kind": error.kind, "source": job.manifest.source(row), "message": error.message}
                )
            else:
                digest = hashlib.blake2b(encoded, digest_size=16).digest()
                for column, value in zip(kept.values(), (image, label, name, row, digest), strict=True):
                    column.append(value)
                counts.update(["rows", what, *(["labelled"] if label is not None else [])])
            row += 1
    digests = np.zeros(len(kept["row"]), DIGEST)
    digests["row"] = kept["row"]
    digests["high"], digests["low"] = np.frombuffer(b"".join(kept.pop("digest")), "<u8").reshape(-1, 2).T
    keys, shard = job.place(digests["row"])
    bucket = (digests["low"] % np.uint64(job.buckets)).astype(np.int64)
    table = pa.table({**kept, "key": keys}, part_schema(job))
    kept.clear()  # the images are held once at a time
    slices = [stream_of(table.take(pa.array(own))) if len(own) else b"" for own in groups(shard, job.shards)]
    del table
    objects = {
        ".arrow": joined(slices),
        ".digests": joined([digests[own].tobytes() for own in groups(bucket, job.buckets)]),
    }
    del slices
    report = {"counts": counts, "bad": Counter(one["kind"] for one in bad)}
    return leave(job, f"{PARTS}scatter-{task:05d}", objects, report, bad)


def duplicates(job: Job, digests: Parts, bucket: int) -> dict[str, Any]:
    """Write, for each target shard, the rows whose bytes are those of an earlier row of the source."""
    found = np.frombuffer(b"".join(digests.read(bucket)), DIGEST)
    found = found[np.lexsort((found["row"], found["low"], found["high"]))]
    same = (found["high"][1:] == found["high"][:-1]) & (found["low"][1:] == found["low"][:-1])
    rows = found["row"][1:][same]
    slices = [rows[own].tobytes() for own in groups(job.place(rows)[1], job.shards)]
    return leave(job, f"{PARTS}duplicates-{bucket:05d}", {".rows": joined(slices)}, {"duplicates": len(rows)})


def gather(job: Job, parts: Parts, dropped: Parts | None, labelled: bool, shard: int) -> dict[str, Any]:
    """Write one target shard: its slices of all parts, sorted by their uniforms."""
    schema = job.schema if labelled else job.schema.remove(job.schema.get_field_index("label"))
    slices = [pa.ipc.open_stream(part).read_all() for part in parts.read(shard) if part]
    table = pa.concat_tables([part_schema(job).empty_table(), *slices]).combine_chunks()
    del slices
    rows = table["row"].to_numpy()
    order = np.lexsort((rows, table["key"].to_numpy()))
    if dropped is not None:
        order = order[~np.isin(rows[order], np.frombuffer(b"".join(dropped.read(shard)), "<i8"))]
    table, sink = table.select(schema.names).replace_schema_metadata(schema.metadata), io.BytesIO()
    settings = {
        "compression": {name: "none" if name == "image" else "zstd" for name in schema.names},  # images are compressed
        "use_dictionary": False,
        "write_statistics": ["label"] if labelled else False,
    }
    with pq.ParquetWriter(sink, schema, **settings) as writer:
        for first in range(0, len(order), ROW_GROUP_ROWS):
            writer.write_table(
                table.take(pa.array(order[first : first + ROW_GROUP_ROWS])), row_group_size=ROW_GROUP_ROWS
            )
    del table
    content = sink.getbuffer()
    metadata = pq.read_metadata(pa.BufferReader(content))
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    report = {
        "rows": len(order),
        "sha256": hashlib.sha256(content).hexdigest(),
        "row_groups": [[group.num_rows, group.column(0).total_compressed_size] for group in groups],
    }
    job.target.write(SHARD.format(shard), content)
    return leave(job, f"{PARTS}part-{shard:05d}", {}, {**report, "objects": {SHARD.format(shard): len(content)}})


def _source_rows(job: Job, chunk: int) -> list[tuple[bytes, int | str | None, str]]:
    """Image, label (None if there is none) and id of all rows of a chunk."""
    manifest, columns = job.manifest, job.columns
    if manifest.layout == "tree":
        label, name = int(manifest.label[chunk]), manifest.name(chunk)
        return [(manifest.store.read(name), label if label >= 0 and columns.label else None, name)]
    if manifest.layout == "tar":
        samples = samples_of(manifest, chunk)
        return [(s.image, label_of(s, columns.label) if columns.label else None, s.key) for s in samples]
    named = [name for name in (columns.label, columns.id) if name]
    table = row_group(manifest, chunk, list(dict.fromkeys([manifest.image_column, *named])))
    first, rows = int(manifest.first_row[chunk]), range(len(table))
    try:
        labels = table[columns.label].cast(columns.kind).to_pylist() if columns.label else [None for _ in rows]
        ids = table[columns.id].cast("string").to_pylist() if columns.id else [None for _ in rows]
    except pa.ArrowException as error:
        place = manifest.store.place(manifest.name(chunk))
        raise UserError(
            f"{place}: its columns {named} have other types than those of {manifest.name(0)} ({' '.join(str(error).split())}); "
            "write them alike, or name another label column"
        ) from error
    ids = [name if name is not None else manifest.source(first + row) for row, name in zip(rows, ids, strict=True)]
    return list(zip(image_bytes(table[manifest.image_column]), labels, ids, strict=True))


def _prepared(encoded: bytes, options: PackOptions) -> tuple[bytes, str]:
    """The image to store, and what was done to it. Raises BadImage."""
    image = decode(encoded, options.max_image_pixels)
    if options.short_side is not None:
        changed = smaller(encoded, image, options.short_side, options.quality)
        if changed is not encoded:
            return changed, "re_encoded"
    changed = as_baseline(encoded, image)
    if changed is not encoded:
        return changed, "made_baseline"
    return encoded, "kept_progressive" if is_progressive(encoded) else "unchanged"


def stream_of(table: pa.Table) -> pa.Buffer:
    """A table as an Arrow IPC stream: a slice that can be read without the rest of its object."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def part_schema(job: Job) -> pa.Schema:
    fields = job.schema.remove_metadata()
    return fields.append(pa.field("row", pa.int64())).append(pa.field("key", pa.float64()))


def groups(values: np.ndarray, count: int) -> list[np.ndarray]:
    """Where each of 0 .. count-1 stands in `values`, in order."""
    order = np.argsort(values, kind="stable")
    return np.split(order, np.searchsorted(values[order], np.arange(1, count)))


def leave(job: Job, stem: str, objects: dict[str, bytes], report: dict, bad: Iterable[dict] = ()) -> dict[str, Any]:
    """Write a task's objects and then, as the sign that it is done, its report: one line, then the bad rows."""
    for suffix, content in objects.items():
        job.target.write(stem + suffix, content)
    report = {"objects": {stem + suffix: len(content) for suffix, content in objects.items()}, **report}
    job.target.write(f"{stem}.json", lines([report, *bad]))
    return report


def lines(values: list[dict]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)
