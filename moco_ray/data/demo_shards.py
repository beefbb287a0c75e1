"""Writes the demo's data sets: a folder of Parquet shards for each split, whole or absent.

Columns `image` (PNG bytes), `label` int64 and `id` string. Not responsible for what the images are (demo.py,
prototypes.py), for packing a user's own images, nor for reading anything back (shards.py).
"""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from moco_ray.errors import UserError

ROWS_PER_ROW_GROUP = 128  # the unit that training reads
ROWS_PER_SHARD = 50 * ROWS_PER_ROW_GROUP
FORMAT_VERSION = 1
SUMMARY = "summary.json"
SHARD = "part-{}.parquet"


class Split(NamedTuple):
    """One folder of a data set, in the order in which it is written."""

    name: str
    images: list[bytes]  # PNG
    labels: np.ndarray  # rows, int64
    ids: list[str]


def shuffled(rows: int, seed: int) -> np.ndarray:
    """A permutation of `rows`, int64. From raw PCG64 bits, which NumPy promises to keep from version to version."""
    return np.argsort(np.random.PCG64(seed).random_raw(rows), kind="stable")


def png(pixels: np.ndarray) -> bytes:
    """H,W uint8 grey as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_once(
    target: Path, identity: dict, classes: tuple[str, ...], make: Callable[[Path], tuple[str, list[Split]]]
) -> dict:
    """Return the summary of a whole `target`, building it first if there is none; `already_there` says which."""
    summary = _recognise(target, identity)
    if summary is not None:
        return {**summary, "already_there": True}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        origin, splits = make(Path(scratch).resolve())  # commands run inside it, so their paths must be whole
        whole = Path(scratch, "whole")
        for split in splits:
            _write_split(whole / split.name, split)
        summary = {
            "arguments": identity,
            "origin": origin,
            "classes": list(classes),
            "rows": {split.name: len(split.ids) for split in splits},
            "bytes": {str(path.relative_to(whole)): path.stat().st_size for path in sorted(whole.glob("*/*.parquet"))},
        }
        (whole / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        if target.is_dir():
            shutil.rmtree(target)  # empty or incomplete, and ours: _recognise has looked
        os.replace(whole, target)
    return {**summary, "already_there": False}


def _recognise(target: Path, identity: dict) -> dict | None:
    """The summary of a whole target; None if it must be built. Raises UserError where building would destroy.

    Only an empty folder, or one that holds a summary, its shards and nothing else, may be replaced: shards
    without a summary may be somebody's own.
    """
    if not target.exists():
        return None
    files = [path for path in target.rglob("*") if not path.is_dir()] if target.is_dir() else [target]
    known = target / SUMMARY in files
    foreign = [path for path in files if path != target / SUMMARY and not (known and path.match(SHARD.format("?????")))]
    if foreign:
        raise UserError(f"{foreign[0]} was not written by demo-data; choose an empty or new folder as the target")
    try:
        summary = json.loads((target / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or a cut one
        return None
    if not isinstance(summary, dict) or not {"arguments", "bytes"} <= summary.keys():
        raise UserError(f"{target / SUMMARY} was not written by demo-data; choose an empty or new folder as the target")
    shards = {name: target / name for name in summary["bytes"]}
    whole = all(path.is_file() and path.stat().st_size == summary["bytes"][name] for name, path in shards.items())
    if whole and summary["arguments"] != identity:
        raise UserError(
            f"{target} holds the data set of {summary['arguments']}, not {identity}; delete it or choose another target"
        )
    return summary if whole else None


def _write_split(folder: Path, split: Split) -> None:
    folder.mkdir(parents=True)
    table = pa.table(
        {
            "image": pa.array(split.images, pa.binary()),
            "label": pa.array(split.labels, pa.int64()),
            "id": pa.array(split.ids, pa.string()),
        }
    )
    for shard, start in enumerate(range(0, table.num_rows, ROWS_PER_SHARD)):
        pq.write_table(
            table.slice(start, ROWS_PER_SHARD),
            folder / SHARD.format(f"{shard:05d}"),
            row_group_size=ROWS_PER_ROW_GROUP,
            compression="none",  # a PNG is compressed already
            use_dictionary=False,
        )
