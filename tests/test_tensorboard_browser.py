"""TensorBoard itself: its pages in a real browser, and the record of a running job in object storage.

Needs node, npm and chromium (Debian's packages nodejs, npm, chromium) and skips without them; playwright-core comes by npm into a
cache. MOCO_RAY_SCREENSHOTS names a folder for the screenshots.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moco_ray import pictures
from moco_ray.data.storage import Store
from moco_ray.monitor import Journal
from moco_ray.tensorboard_page import LAYOUT, TAGS
from tests import synthetic
from tests.object_stores import free_port, use

pytestmark = pytest.mark.slow
LOOK = Path(__file__).parent / "browser" / "look.mjs"
PLAYWRIGHT = "playwright-core@1"


@contextlib.contextmanager
def tensorboard(logdir: str, *flags: str, **environment: str) -> Iterator[str]:
    """Serves it; its address."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--port", str(port), "--reload_interval", "5", *flags]
    with open(os.devnull, "w") as nowhere:
        process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, env=os.environ | environment)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/data/environment", timeout=5).read()
                break
            time.sleep(0.3)
        assert process.poll() is None
        yield address
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> dict[str, str]:
    """Where playwright-core lies, and the environment that node needs; skips where something is missing."""
    found = {name: shutil.which(name) for name in ("node", "npm", "chromium")}
    if missing := [name for name, path in found.items() if path is None]:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install nodejs npm chromium")
    folder = Path(os.environ.get("MOCO_RAY_NODE_CACHE") or tmp_path_factory.mktemp("node"))
    if not (folder / "node_modules" / "playwright-core").exists():
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), PLAYWRIGHT]
        done = subprocess.run(install, capture_output=True, text=True, timeout=300, cwd=folder)
        if done.returncode:
            pytest.skip(f"npm cannot install {PLAYWRIGHT}: {done.stderr.strip().splitlines()[-1:]}")
    return {"folder": str(folder), "CHROMIUM": found["chromium"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder with every scalar, two pictures, a verdict and an environment."""
    folder = tmp_path_factory.mktemp("run")
    journal = Journal(Store(str(folder)), synthetic.plan(synthetic.recipe()), 0)
    code = {"git_commit": "abc", "git_dirty": False, "python": "3.11", "versions": {"torch": "2.14"}}
    journal.begun(0, code, ["node1"], ["a fast one, 80 GiB"])
    for step in range(1, 11):
        scalars = {name: 1.0 / step for name in TAGS if name not in ("knn_top1", "verdicts")}
        journal.record({**scalars, "step": step, "chance_loss": 5.0}, [])
    journal.record({"step": 10, "knn_top1": 0.5}, [])
    views = np.random.default_rng(0).integers(0, 256, (12, 2, 32, 32, 3), dtype=np.uint8)
    sheet = pictures._jpeg(pictures.views_sheet(views, 10))
    journal.pictures(10, {"pictures/two_views": sheet, "pictures/hardest_negatives": sheet}, {})
    journal.close()
    return folder


def test_a_browser_shows_the_layout_the_pictures_the_texts_and_the_hyperparameters(run, browser, tmp_path):
    shots = Path(os.environ.get("MOCO_RAY_SCREENSHOTS") or tmp_path)
    with tensorboard(str(run / "tensorboard")) as address:
        look = ["node", str(LOOK), address, str(shots)]
        done = subprocess.run(look, capture_output=True, text=True, timeout=400, cwd=browser["folder"], env=os.environ | browser)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["categories"] == list(LAYOUT)
    for charts in LAYOUT.values():
        for title, names in charts.items():
            assert title in seen["custom_scalars_words"]
            assert all(f"{TAGS[name]} (.)" in seen["custom_scalars_words"] for name in names), title
    assert f"{TAGS['queue_top1']} (reference)" in seen["custom_scalars_words"]
    assert [image["width"] for image in seen["images"]] == [904, 904], "both were decoded"
    assert "pictures/two_views" in seen["images_words"] and "pictures/hardest_negatives" in seen["images_words"]
    for words in ("node1: a fast one, 80 GiB", "abc"):
        assert words in seen["text_words"]
    assert "contrast.queue_keys" in seen["hparams_words"] and TAGS["knn_top1"] in seen["hparams_words"]
    assert {path.stem for path in shots.glob("*.png")} >= {"custom_scalars", "images", "text", "hparams"}


def newest_step(address: str) -> int:
    try:
        tag = TAGS["loss"].replace("/", "%2F")
        with urllib.request.urlopen(f"{address}/data/plugin/scalars/scalars?run=.&tag={tag}", timeout=10) as answer:
            return int(json.load(answer)[-1][1])
    except (OSError, IndexError):  # 404: not there yet
        return 0


def test_a_step_of_a_running_job_in_object_storage_appears_within_a_minute(moto, no_aws, monkeypatch, tmp_path):
    """The journal copies every 20 s, as the driver does; `tensorboard --logdir s3://..` reads what is there.

    Of moto, which replaces an object whole, as S3 does. rclone's server overwrites in place: a read that it cuts off ends TensorBoard's
    reader for good, in one run of some.
    """
    moto.create_bucket("runs")
    use(monkeypatch, moto)
    journal = Journal(Store("s3://runs/first"), synthetic.plan(synthetic.recipe()), 0)
    try:
        journal.record({"step": 1, "loss": 1.0, "chance_loss": 5.0, "queue_fill": 1.0}, [])
        journal.sync()
        with tensorboard("s3://runs/first/tensorboard", **moto.environment()) as address:
            while newest_step(address) < 1:
                time.sleep(0.5)
            journal.record({"step": 2, "loss": 0.9, "chance_loss": 5.0, "queue_fill": 1.0}, [])
            journal.sync()
            journal.record({"step": 3, "loss": 0.8, "chance_loss": 5.0, "queue_fill": 1.0}, [])  # just too late for that copy
            began = time.monotonic()
            while newest_step(address) < 3:
                journal.sync_if_due()
                assert time.monotonic() - began < 60
                time.sleep(0.5)
            print(f"step 3 appeared after {time.monotonic() - began:.0f} s")
    finally:
        journal.close()
