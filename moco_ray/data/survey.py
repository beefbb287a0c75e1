"""Makes the manifest of a data set: from its names, the footers of its shards, or the index of its tars.

Responsible for finding out what a data set holds, for reading many files side by side, for the cache of manifests, and
for believing the manifest that `moco-ray pack` left beside its shards. Not responsible for what a manifest is
(shards.py) nor for what one file says (listing.py, tars.py). Knows no Ray: a caller that has one hands in `spread`.

No rows are held. Measured at the peak (tests/bench/manifest.py): 1.2 MB for each million rows in row groups of 128 and shards
of 10,240, 0.5 kB for each file of a tree.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from moco_ray.data.listing import OURS, Found, Index, find_data, read_footer, sorted_by_class
from moco_ray.data.shards import MANIFEST_VERSION, Manifest, make_manifest
from moco_ray.data.storage import Entry, Store
from moco_ray.data.tars import scan_tar
from moco_ray.errors import UserError
from moco_ray.stages import Stages

THREADS = 32  # a footer is one or two short reads: waiting, not work
FILES_PER_TASK = 64  # of Parquet, where they are read by tasks; a tar is a task of its own
LARGE_FILES, LARGE_TAR_BYTES = 2048, 4 << 30  # from here on tasks on a cluster are worth their start
CACHED = 64  # manifests
PACKED = OURS + "pack.json"
PACKED_MANIFEST = OURS + "manifest.parquet"
LARGE_ROW_GROUP_BYTES = 256 << 20

Read = Callable[[Sequence[Entry]], list[Index]]
Spread = Callable[[Read, Sequence[Sequence[Entry]]], Iterable[list[Index]]]  # an ordered map over tasks


def build_manifest(uri: str, image_column: str = "image", spread: Spread | None = None) -> Manifest:
    """Find out what a data set holds. Reads footers and tar headers, never an image.

    `uri` is a folder, or a URI of S3 or any fsspec filesystem. It holds Parquet shards (found in subfolders too) with
    encoded images in `image_column` (binary, or the Hugging Face struct of bytes and path), WebDataset tars, or a tree
    of image files. Names that begin with a dot are ignored. `spread` carries the reading of a large data set to other
    machines; without it threads of this process do it. Raises UserError, one line, if there is nothing, a mixture, a
    data set still being packed, an unreadable shard or tar, or no such column.
    """
    store = Store.at(uri)
    with Stages(sys.stderr) as at:
        at(f"listing {store.place('')}")
        found = find_data(store)
    if found.layout == "tree":
        return _tree_manifest(store, found.entries)
    if any(entry.name == PACKED for entry in found.others):
        return _packed_manifest(store, found, image_column)
    cached = _cache_file(store, found, image_column)
    if cached is not None and cached.is_file():
        try:
            return Manifest.load(cached).at(store)
        except UserError:  # damaged, or of another release: made anew
            pass
    manifest = index_manifest(store, found, image_column, spread)
    _keep(manifest, cached)
    return manifest


def index_manifest(store: Store, found: Found, image_column: str, spread: Spread | None = None) -> Manifest:
    """The manifest of shards or tars, by reading each of them. Raises UserError."""
    entries, tars = found.entries, found.layout == "tar"
    read = partial(_read_tars, store) if tars else partial(_read_footers, store, image_column)
    large = sum(e.bytes for e in entries) >= LARGE_TAR_BYTES if tars else len(entries) >= LARGE_FILES
    each = FILES_PER_TASK if large and not tars else 1
    tasks = [entries[first : first + each] for first in range(0, len(entries), each)]
    parts = spread(read, tasks) if spread is not None and large else _threads(read, tasks)
    what = "reading tars" if tars else "reading footers"
    if tars and not store.is_local:
        total = sum(entry.bytes for entry in entries)
        print(f"indexing {len(entries)} tars by one full read of {total / 1e9:.3g} GB", file=sys.stderr)
    return _of_indexes(store, found, image_column, list(_with_progress(parts, len(entries), what)))


def _read_footers(store: Store, image_column: str, entries: Sequence[Entry]) -> list[Index]:
    with ThreadPoolExecutor(min(THREADS, len(entries))) as threads:
        return list(threads.map(lambda entry: read_footer(store, entry.name, image_column), entries))


def _read_tars(store: Store, entries: Sequence[Entry]) -> list[Index]:
    return [scan_tar(store, entry) for entry in entries]


def _threads(read: Read, tasks: Sequence[Sequence[Entry]]) -> Iterator[list[Index]]:
    with ThreadPoolExecutor(THREADS) as threads:
        try:
            yield from threads.map(read, tasks)
        finally:
            threads.shutdown(cancel_futures=True)  # after an error nobody waits for the rest


def _with_progress(parts: Iterable[list[Index]], total: int, what: str) -> Iterator[Index]:
    with Stages(sys.stderr) as at:
        done = 0
        at(what, done, total, "files")
        for part in parts:
            done += len(part)
            at(what, done, total, "files")
            yield from part


def _of_indexes(store: Store, found: Found, image_column: str, indexes: list[Index]) -> Manifest:
    kept = [(entry.name, index) for entry, index in zip(found.entries, indexes, strict=True) if index.rows.any()]
    warnings = _damaged(found.entries, indexes)
    if not kept:
        more = f" ({warnings[0]})" if warnings else ""
        raise UserError(f"the {len(indexes)} files in {store.place('')} hold no rows; give a folder with images{more}")
    full = [np.flatnonzero(index.rows) for _, index in kept]  # row groups without rows are no chunks
    columns = [
        np.concatenate([getattr(index, what)[parts] for (_, index), parts in zip(kept, full, strict=True)])
        for what in ("rows", "bytes", "offset")
    ]
    warnings += [w for w in (sorted_by_class([i for _, i in kept]), _large_row_groups(found, columns[1])) if w]
    file = np.repeat(np.arange(len(kept)), [len(parts) for parts in full])
    return make_manifest(
        store.uri,
        found.layout,
        image_column if found.layout == "parquet" else "",
        pa.array([name for name, _ in kept], pa.string()),
        file,
        np.concatenate(full),
        *columns,
        np.full(len(file), -1),
        [],
        [f"{store.place('')}: {warning}" for warning in warnings],
    )


def _damaged(entries: list[Entry], indexes: list[Index]) -> list[str]:
    both = zip(entries, indexes, strict=True)
    hurt = [f"{e.name}: {i.damage}, {int(i.rows.sum())} images kept" for e, i in both if i.damage]
    if not hurt:
        return []
    more = f"; {len(hurt) - 3} more" if len(hurt) > 3 else ""
    return [f"{len(hurt)} tars are not whole, the images before that point are used ({'; '.join(hurt[:3])}{more})"]


def _large_row_groups(found: Found, sizes: np.ndarray) -> str:
    if found.layout != "parquet" or sizes.max() < LARGE_ROW_GROUP_BYTES:
        return ""
    return (
        f"row groups of up to {sizes.max() / 1e6:.0f} MB are read whole for a few rows of each, by every task that needs "
        "one; pack the data set (moco-ray pack writes row groups of 128 rows)"
    )


def _tree_manifest(store: Store, entries: list[Entry]) -> Manifest:
    names = [entry.name for entry in entries]
    folders = [name.partition("/")[0] if "/" in name else "" for name in names]
    classes = sorted(set(folders) - {""})
    number = {name: index for index, name in enumerate(classes)} | {"": -1}
    file = np.arange(len(names))
    return make_manifest(
        store.uri,
        "tree",
        "",
        pa.array(names, pa.string()),
        file,
        file * 0,
        file * 0 + 1,
        [entry.bytes for entry in entries],
        file * 0,
        [number[folder] for folder in folders],
        classes,
        [],
    )


def _packed_manifest(store: Store, found: Found, image_column: str) -> Manifest:
    """What pack left, once the shards are seen to be those that it wrote, by name and size."""
    try:
        written = {name: shard["bytes"] for name, shard in json.loads(store.read(PACKED))["shards"].items()}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{store.place(PACKED)} is damaged; bring it back, or remove it to use the shards as they are") from error
    there = {entry.name: entry.bytes for entry in found.entries}
    if written != there:
        wrong = sorted(name for name in written.keys() | there.keys() if written.get(name) != there.get(name))
        raise UserError(
            f"{store.place('')} is not what `moco-ray pack` wrote: {wrong[0]} has {there.get(wrong[0], 'no')} bytes, not "
            f"{written.get(wrong[0], 'any')} ({len(wrong)} such shards); bring it back, or remove {PACKED} to use the "
            "shards as they are"
        )
    if image_column != "image":
        raise UserError(f"{store.place('')} was packed: its images are in column 'image', not {image_column!r}")
    content = pa.BufferReader(store.read(PACKED_MANIFEST))
    return Manifest.load(content, store.place(PACKED_MANIFEST)).at(store)


def _cache_file(store: Store, found: Found, image_column: str) -> Path | None:
    """Where the manifest of exactly these files is kept on this machine; None where changes cannot be noticed."""
    if not all(entry.version for entry in found.entries) or not (os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME")):
        return None
    digest = hashlib.sha256(f"{MANIFEST_VERSION} {store.uri} {image_column} {found.layout}".encode())
    for entry in found.entries:
        digest.update(f"\0{entry.name}\0{entry.bytes}\0{entry.version}".encode())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return home / "moco_ray" / "manifests" / f"{digest.hexdigest()[:32]}.parquet"


def _keep(manifest: Manifest, path: Path | None) -> None:
    """Put a manifest into the cache, and the oldest out of it. Nothing depends on it: a full disk is no error."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as scratch:
            manifest.save(Path(scratch, "manifest"))
            os.replace(Path(scratch, "manifest"), path)
        by_age = sorted(path.parent.glob("*.parquet"), key=lambda old: old.stat().st_mtime, reverse=True)
        for old in by_age[CACHED:]:
            old.unlink(missing_ok=True)
    except OSError:
        return
