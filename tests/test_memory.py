"""That memory does not grow with the data: a consumer slower than its data tasks, in an object store sized by the plan."""

import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from moco_ray.plan import Plan
from moco_ray.recipe import Recipe

DATA_TASKS, STEPS, PIXELS = 2, 46, 128
MOST_STEPS = 22  # in the store, of the 30 that tasks make; measured 12 or 13 with 6,000 to 120,000 rows, but 17 to 20 with 30,000
RECIPE = Recipe.parse({"schedule": {"steps": STEPS}, "augment": {"image_pixels": PIXELS}})  # 256 rows, 25 MB a step


def picture(number: int) -> bytes:
    """A PNG of 40x40 pixels of noise: 5 kB, so that what a task reads is seen in its memory."""
    pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "png", compress_level=1)
    return encoded.getvalue()


def write(folder: Path, rows: int) -> None:
    """One shard of all rows, as large as it gets."""
    images = [picture(number) for number in range(500)]
    table = pa.table({"image": [images[row % 500] for row in range(rows)]})
    pq.write_table(table, folder / "all.parquet", row_group_size=128, use_dictionary=False)


def heap_bytes(process: str) -> int:
    """Memory of its own: pages shared with the object store are not counted."""
    for line in Path("/proc", process, "status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return 0


def measure(folder: str) -> None:
    """In a process of its own: stream the run, and print the peaks of the object store, of this process and of the tasks."""
    import ray
    from ray._private.internal_api import memory_summary

    from moco_ray.data import stream
    from moco_ray.data.survey import build_manifest

    stream.TASKS_PER_PIPELINE = 2  # so that there are seams
    manifest = build_manifest(folder)
    plan = Plan(RECIPE, manifest.rows)
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as place:
        ray.init(
            num_cpus=DATA_TASKS,
            include_dashboard=False,
            _temp_dir=place,
            object_store_memory=plan.object_store_bytes(1, DATA_TASKS),
            log_to_driver=False,
        )
        address = ray.get_runtime_context().gcs_address
        peaks, stop = {"store": 0, "spilled": 0, "heap": 0, "tasks": 0}, threading.Event()

        def see(name: str, value: int) -> None:
            peaks[name] = max(peaks[name], value)

        def watch() -> None:
            while not stop.wait(0.2):
                text = memory_summary(address=address, stats_only=True)
                for name, before in (("store", "Plasma memory usage "), ("spilled", "Spilled ")):
                    see(name, int(text.partition(before)[2].split()[0]) << 20 if before in text else 0)
                for status in Path("/proc").glob("[0-9]*"):
                    try:
                        if b"run_tasks" in (status / "cmdline").read_bytes() and place in environment(status):
                            see("tasks", heap_bytes(status.name))
                    except OSError:
                        continue  # it has ended

        watcher = threading.Thread(target=watch)
        watcher.start()
        steps = 0
        for _ in stream.batches(manifest, RECIPE, plan, 1, 0, 0):
            steps += 1
            time.sleep(0.15)
            see("heap", heap_bytes("self"))
        stop.set()
        watcher.join()
        ray.shutdown()
    print(json.dumps({**peaks, "steps": steps, "sized": plan.object_store_bytes(1, DATA_TASKS)}))


def environment(process: Path) -> str:
    """The command lines of a process's ancestors, which hold the folder of its Ray."""
    parent = next(line for line in (process / "status").read_text().splitlines() if line.startswith("PPid"))
    return (process.parent / parent.split()[1] / "cmdline").read_text()


@pytest.mark.slow
def test_memory_grows_neither_with_the_data_set_nor_with_the_shard_and_nothing_spills(tmp_path):
    found = []
    for rows in (6_000, 60_000):
        (tmp_path / str(rows)).mkdir()
        write(tmp_path / str(rows), rows)
        words = [sys.executable, "-c", f"from tests.test_memory import measure; measure({str(tmp_path / str(rows))!r})"]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=400, cwd=Path(__file__).parent.parent,
                                env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"})  # fmt: skip
        assert answer.returncode == 0, answer.stderr[-2000:]
        found.append(json.loads(answer.stdout.splitlines()[-1]))
    small, large = found
    assert small["steps"] == large["steps"] == STEPS and small["tasks"] > 0 and small["store"] > 0, found  # it was seen
    for peaks in found:
        assert peaks["spilled"] == 0 and peaks["store"] <= peaks["sized"], found
        assert peaks["store"] <= MOST_STEPS * 256 * 6 * PIXELS**2, found
    for name, slack in (("heap", 0.15), ("tasks", 0.25)):
        assert large[name] <= (1 + slack) * small[name] + (32 << 20), (name, found)
