"""20,000 images of all kinds packed from a real S3 server to it, killed in the middle and run again."""

import hashlib
import io
import json
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.object_stores import rclone_server
from tests.shell import Shell

IMAGES = 20_000
KINDS = {  # mode, format, options
    "rgb.jpg": ("RGB", "jpeg", {}),
    "progressive.jpg": ("RGB", "jpeg", {"progressive": True}),
    "gray.jpg": ("L", "jpeg", {}),
    "cmyk.jpg": ("CMYK", "jpeg", {}),
    "rgb.png": ("RGB", "png", {"compress_level": 1}),
    "alpha.png": ("RGBA", "png", {"compress_level": 1}),
    "palette.gif": ("L", "gif", {}),
    "rgb.webp": ("RGB", "webp", {"method": 0}),
    "png named.jpg": ("RGB", "png", {"compress_level": 1}),
}
BROKEN = {"zero bytes.jpg": b"", "page.jpg": b"<!DOCTYPE html><html></html>", "text.png": b"no image", "cut.jpg": None}
SMALL = {"task_bytes": 4 << 20, "shard_bytes": 4 << 20, "seed": 5}


def main() -> None:
    """`python -m tests.test_pack_storage SOURCE TARGET`: pack with tasks and shards small enough for a test."""
    from moco_ray.data.pack import pack
    from moco_ray.data.pack_passes import PackOptions
    from moco_ray.session import ray_session

    with ray_session(1):
        print(json.dumps(pack(sys.argv[1], sys.argv[2], PackOptions(**SMALL))))


def write_tree(root: Path) -> dict[str, int]:
    """The images, in class folders; returns how many of each kind of broken one there are."""
    rng, kinds, broken = np.random.default_rng(0), list(KINDS.items()), list(BROKEN.items())
    count = dict.fromkeys(BROKEN, 0)
    for number in range(IMAGES):
        folder = root / f"class {number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        if number % 100 == 99:
            name, content = broken[number // 100 % len(broken)]
            count[name] += 1
        else:
            name, (mode, kind, options) = kinds[number % len(kinds)]
            encoded = io.BytesIO()
            pixels = Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8))
            pixels.convert(mode).save(encoded, kind, **options)
            content = encoded.getvalue()
        if content is None:
            whole = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8)).save(whole, "jpeg")
            content = whole.getvalue()[:-300]
        (folder / f"{number:05} {name}").write_bytes(content)
    return count


def shards(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.parquet"))}


@pytest.mark.slow
def test_packing_from_storage_to_storage_survives_a_kill_within_2_gib_a_process(tmp_path):
    broken = write_tree(tmp_path / "source")
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    shell = Shell(Path(__file__).parent.parent, {})
    with rclone_server(tmp_path, follow=False) as store:
        shell = Shell(Path(__file__).parent.parent, store.environment())
        module = "tests.test_pack_storage"
        code, out, error = shell.run("s3://source", "s3://whole/data", module=module)
        assert code == 0, error[-3000:]
        facts = json.loads(out.splitlines()[-1])
        process = shell.start("s3://source", "s3://killed/data", module=module)
        parts, peak = tmp_path / "killed/data/_moco_ray/parts", 0
        while len(list(parts.glob("scatter-*.json"))) < 3:
            assert process.poll() is None, process.communicate()
            peak = max(peak, shell.peak_worker_bytes())
            time.sleep(0.2)
        shell.kill(process)
        done = len(list(parts.glob("scatter-*.json")))
        assert (tmp_path / "killed/data/_moco_ray/unfinished.json").exists() and done < facts_tasks(facts)
        refused = shell.run("show-plan", "jobs/moco_v2_cifar10.toml", "--data", "s3://killed/data")
        assert refused[0] == 2 and "run the same `moco-ray pack` again" in refused[2]
        process = shell.start("s3://source", "s3://killed/data", module=module)
        while process.poll() is None:
            peak = max(peak, shell.peak_worker_bytes())
            time.sleep(0.2)
        out, error = process.communicate()
        assert process.returncode == 0, error[-3000:]
    shell.close()
    assert json.loads(out.splitlines()[-1])["rows"] == facts["rows"] == IMAGES - sum(broken.values())
    assert facts["bad"] == {
        "empty": broken["zero bytes.jpg"],
        "not an image": broken["page.jpg"] + broken["text.png"],
        "truncated": broken["cut.jpg"],
    }
    assert shards(tmp_path / "killed/data") == shards(tmp_path / "whole/data") and len(facts["shards"]) > 3
    assert 0 < peak < 2 << 30, peak
    labels = pq.read_table(tmp_path / "whole/data", columns=["label"])["label"].to_numpy()
    assert set(labels) == set(range(7)) and facts["made_baseline"] > 2000
    assert not list((tmp_path / "killed/data/_moco_ray").glob("parts/*"))


def facts_tasks(facts: dict) -> int:
    """At least so many scatter tasks there were."""
    return facts["source_bytes"] // (4 << 20)


if __name__ == "__main__":
    main()
