"""What a manifest costs: seconds and peak memory of making one, for each layout, by rows.

Run by hand: `python tests/bench/manifest.py [--rows 10000000] [--json FILE]`. Not a test: nothing here passes or fails.
Rows are synthetic (a few bytes each: no image is read to make a manifest). Each measurement is a process of its own; the
memory is its peak resident size less that of the same process before it looks at the data.
"""

import argparse
import io
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP, ROWS_PER_SHARD = 128, 10_240
TAR_SHARE, TREE_SHARE = 50, 100  # tars and trees are made of fewer rows: the disk pays for each


def write_parquet(folder: Path, rows: int) -> None:
    table = pa.table({"image": [b"image"] * ROWS_PER_SHARD, "label": [i % 1000 for i in range(ROWS_PER_SHARD)]})
    pq.write_table(table, folder / "part-000000.parquet", row_group_size=ROW_GROUP)
    content = (folder / "part-000000.parquet").read_bytes()
    for shard in range(1, -(-rows // ROWS_PER_SHARD)):
        (folder / f"part-{shard:06}.parquet").write_bytes(content)


def write_tars(folder: Path, rows: int, each: int = 10_000) -> None:
    for first in range(0, rows, each):
        with tarfile.open(folder / f"{first:09}.tar", "w") as archive:
            for row in range(first, min(first + each, rows)):
                for suffix, content in (("jpg", b"image"), ("cls", b"7")):
                    member = tarfile.TarInfo(f"{row:09}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def write_tree(folder: Path, rows: int) -> None:
    for row in range(rows):
        if row % 1000 == 0:
            (folder / f"class{row // 1000:05}").mkdir()
        (folder / f"class{row // 1000:05}" / f"photograph-{row:012}.jpg").touch()


def measure(folder: str) -> None:
    """In a process of its own: print seconds, bytes, and what was found."""
    from moco_ray.data.survey import build_manifest

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    manifest = build_manifest(folder)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        json.dumps({"seconds": seconds, "peak_bytes": peak << 10, "rows": manifest.rows, "chunks": len(manifest.part)})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    results = {}
    layouts = (("parquet", write_parquet, 1), ("tar", write_tars, TAR_SHARE), ("tree", write_tree, TREE_SHARE))
    print(f"{'layout':<8} {'rows':>12} {'chunks':>9} {'s':>7} {'s a million rows':>17} {'MB a million rows':>18}")
    for name, write, share in layouts:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "data").mkdir()
            write(Path(folder, "data"), arguments.rows // share)
            words = [sys.executable, __file__, "--measure", str(Path(folder, "data"))]
            variables = {"XDG_CACHE_HOME": folder, "PATH": "/usr/bin:/bin"}
            found = json.loads(subprocess.run(words, check=True, capture_output=True, env=variables).stdout)
        results[name] = found
        millions = found["rows"] / 1e6
        print(
            f"{name:<8} {found['rows']:>12,} {found['chunks']:>9,} {found['seconds']:>7.1f} "
            f"{found['seconds'] / millions:>17.2f} {found['peak_bytes'] / 1e6 / millions:>18.2f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
