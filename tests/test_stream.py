"""The ordered stream of decoded rows, on a local Ray, against a slow reading of the rules in this process.

Three logical CPUs: where two ranks run, two are reserved as Train's workers do, so their pipelines share the third.
"""

import io
import json
import os
import shutil
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from PIL import Image

from moco_ray.bench_input import as_text, bench_input, write_json
from moco_ray.cluster import forget_pipelines, keep_helpers_here
from moco_ray.data import on_ray, stream, survey
from moco_ray.data.decode import CROP_DRAWS, BadImage, centre_crop, decode, two_crops
from moco_ray.data.draws import CROP, REPLACE, uniforms
from moco_ray.data.listing import find_data
from moco_ray.data.order import EpochOrder
from moco_ray.data.segment import Segments, Source, segment_steps
from moco_ray.data.storage import Store
from moco_ray.data.survey import build_manifest
from moco_ray.errors import UserError
from moco_ray.placement import DataPlace
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe
from tests.fault_proxy import FaultProxy
from tests.object_stores import rclone_server

# 10 steps of 256 an epoch in windows of 8 and 2, and 140 rows left out; the run ends in the second epoch
ROWS, STEPS = 2700, 13
BAD = {100: b"no image at all", 1500: b""} | {row: b"\x89PNG\r\n\x1a\n" for row in range(50, 2700, 150)}


def picture(number: int) -> bytes:
    """A PNG of 12x16 pixels, different for every number."""
    pixels = np.random.default_rng(number).integers(0, 256, (12, 16, 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "png", compress_level=1)
    return encoded.getvalue()


@pytest.fixture(scope="module")
def bucket(folder):
    """A real S3 server over the folders of `folder`, each a bucket; its key is in the environment."""
    with rclone_server(folder) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment().items():
            patch.setenv(name, value)
        yield store


@pytest.fixture(scope="module")  # stopped before the next file starts its own
def cluster(bucket):
    """The one local Ray of this file, in a folder of its own. Its tasks inherit the key of the S3 server."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: it holds sockets
    ray.init(num_cpus=3, include_dashboard=False, _temp_dir=folder, object_store_memory=150 << 20, log_to_driver=False)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`good`, `damaged` (some images of the same rows damaged): Parquet; `tree`: 600 files in three classes; `tars`: 600
    samples in tars of 1 to 400."""
    root = tmp_path_factory.mktemp("data")
    images = [picture(i) for i in range(ROWS)]
    for name, bad in {"good": {}, "damaged": BAD}.items():
        (root / name).mkdir()
        for shard, first in enumerate(range(0, ROWS, 500)):  # shards of 500 and of 200 rows
            numbers = range(first, min(first + 500, ROWS))
            table = pa.table({"image": [bad.get(i, images[i]) for i in numbers], "label": [i % 10 for i in numbers]})
            pq.write_table(table, root / name / f"{shard}.parquet", row_group_size=37)
    for number in range(600):
        path = root / "tree" / f"class{number % 3}" / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(images[number])
    (root / "tars").mkdir()
    for name, first, stop in (("a", 0, 1), ("b", 1, 401), ("c", 401, 600)):
        with tarfile.open(root / "tars" / f"{name}.tar", "w") as archive:
            for number in range(first, stop):
                for suffix, content in (("png", images[number]), ("cls", b"%d" % (number % 10))):
                    member = tarfile.TarInfo(f"{number:06}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return root


def source_of(folder: Path, batch=256, group=64, steps=STEPS, **sections) -> Source:
    batch_sizes = {"global_batch_size": batch, "bn_group_size": group}
    recipe = Recipe.parse({"schedule": {"steps": steps}, "batch": batch_sizes, "run": {"seed": 3},
                           "augment": {"image_pixels": 8}, **sections})  # fmt: skip
    manifest = build_manifest(str(folder), recipe.data.image_column)
    return Source(manifest, recipe, Plan(recipe, manifest.rows))


@lru_cache(maxsize=4)
def reference(source: Source) -> list[dict]:
    """The whole run row by row: for each step crops (B,2,P,P,3), rows (B,) and {position: bad row}."""
    manifest, recipe, plan = source.manifest, source.recipe, source.plan
    images = {}
    for chunk in range(len(manifest.chunk_rows)):
        path = Path(manifest.root, manifest.name(chunk))
        if manifest.layout == "tree":
            images[chunk] = path.read_bytes()
        elif manifest.layout == "tar":  # names sorted: the samples are in the order of their numbers
            images |= {row: picture(row) for row in range(manifest.rows)}
        else:
            column = pq.ParquetFile(path).read_row_group(int(manifest.part[chunk]))["image"]
            images |= dict(enumerate(column.to_pylist(), int(manifest.first_row[chunk])))
    run = []
    for step in range(plan.total_steps):
        epoch, inner = divmod(step, plan.steps_per_epoch)
        order = EpochOrder(manifest.chunk_rows, plan, recipe.run.seed, epoch)
        found = {"crops": [], "rows": [], "bad": {}}
        for group in range(plan.groups):
            for row, position in zip(order.rows_of(inner, group), order.positions_of(inner, group), strict=True):
                one = np.array([position])
                window = order.window_rows(group, inner // plan.window_steps)
                draws = uniforms(recipe.run.seed, epoch, one, 0, REPLACE, len(window))[0]
                for candidate in [row, *window[np.argsort(draws)]]:
                    try:
                        image = decode(images[candidate], recipe.data.max_image_pixels)
                        break
                    except BadImage:
                        found["bad"][int(position)] = int(row)
                views = [uniforms(recipe.run.seed, epoch, one, view, CROP, CROP_DRAWS)[0] for view in (0, 1)]
                found["crops"].append(two_crops(image, np.stack(views), recipe.augment))
                found["rows"].append(candidate)
        run.append(found | {"crops": np.stack(found["crops"]), "rows": np.array(found["rows"])})
    return run


def streamed(source: Source, world: int, rank: int, start: int, head_start: bool = False) -> list:
    """A rank's batches as numpy: (epoch, crops, positions, rows, bad) each. By default all of them are made by Ray's tasks."""
    found = stream.batches(source.manifest, source.recipe, source.plan, world, rank, start, head_start=head_start)
    return [(b.epoch, b.crops.numpy().copy(), b.positions.numpy().copy(), b.rows.numpy().copy(), b.bad) for b in found]


@ray.remote(num_cpus=2)
class Reserved:
    """Holds two CPUs, as two Train workers do. Not the workers themselves: each would import torch for seconds."""

    def ready(self) -> None:
        pass


def assert_is_the_run(source: Source, ranks: list[list], start: int) -> None:
    """All ranks' batches together are the reference from `start` on, bit by bit."""
    expected, plan = reference(source)[start:], source.plan
    assert [len(found) for found in ranks] == [len(expected)] * len(ranks)
    for index, step in enumerate(expected):
        epochs, crops, positions, rows, bad = zip(*(found[index] for found in ranks), strict=True)
        epoch, inner = divmod(start + index, plan.steps_per_epoch)
        batch = plan.recipe.batch.global_batch_size
        assert set(epochs) == {epoch}
        assert (np.concatenate(positions) == np.arange(inner * batch, (inner + 1) * batch)).all()
        assert (np.concatenate(rows) == step["rows"]).all()
        assert (np.concatenate(crops) == step["crops"]).all()
        assert {one.position: one.row for some in bad for one in some} == step["bad"]


def test_one_rank_streams_the_run_and_a_damaged_image_is_replaced_and_listed(cluster, folder):
    source = source_of(folder / "damaged")
    ranks = [streamed(source, 1, 0, 0, head_start=True)]
    assert_is_the_run(source, ranks, 0)
    assert_is_the_run(source, [streamed(source, 1, 0, 0)], 0)
    bad = [one for batch in ranks[0] for one in batch[4]]
    assert {one.row for one in bad} <= set(BAD) and len(bad) >= len(BAD)
    assert {(one.row, one.kind) for one in bad} >= {(100, "not an image"), (1500, "empty")}
    assert {one.source for one in bad if one.row == 1500} == {"3.parquet row group 0 row 0"}


def test_a_damaged_image_changes_its_own_row_and_nothing_else(folder):
    good, damaged = (reference(source_of(folder / name)) for name in ("good", "damaged"))
    changed = 0
    for one, other in zip(good, damaged, strict=True):
        differs = one["rows"] != other["rows"]
        assert one["rows"][differs].tolist() == list(other["bad"].values())
        assert (one["crops"][~differs] == other["crops"][~differs]).all()
        assert not set(other["rows"].tolist()) & set(BAD)
        changed += differs.sum()
    assert changed >= len(BAD)


def test_two_ranks_with_one_spare_cpu_resume_within_a_window_what_another_world_began(cluster, folder):
    source = source_of(folder / "damaged")
    workers = Reserved.remote()
    ray.get(workers.ready.remote())
    assert ray.available_resources()["CPU"] == 1
    for start in (3, 9):  # within the first window, and within the second
        with ThreadPoolExecutor(2) as threads:
            ranks = list(threads.map(lambda rank, start=start: streamed(source, 2, rank, start, start == 3), range(2), timeout=300))
        assert_is_the_run(source, ranks, start)
    ray.kill(workers)


def in_lock_step(source: Source, steps: int) -> list[int]:
    """Two ranks that take every step together, as an exchange of keys makes them; in step 4 both also evaluate."""
    barrier, counts = threading.Barrier(2, timeout=60), [0, 0]

    def rank(number: int) -> None:
        for batch in stream.batches(source.manifest, source.recipe, source.plan, 2, number, 0, place=lambda: DataPlace(1)):
            barrier.wait()
            counts[number] += len(batch.rows) > 0
            if counts[number] == 4:
                rows = np.arange(number, 40, 2)
                found = list(stream.labelled_images(source.manifest, source.recipe, rows, 20, ranks=2))
                assert sum(len(one.rows) for one in found) == 20
            if counts[number] == steps:
                return

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(rank, range(2)))
    return counts


def test_ranks_in_lock_step_with_one_cpu_for_their_data_neither_starve_each_other_nor_an_evaluation(cluster, folder):
    """Every task makes 56 steps, of which a pipeline holds 8: tasks pause, and must not keep what others need."""
    settings = {"evaluation": {"resize_pixels": 10}}
    source = source_of(folder / "good", batch=48, group=6, steps=10 * 56, **settings)
    assert Segments(source.plan, 2, 0, 0).segments_per_epoch == 1 and source.plan.steps_per_epoch == 56
    workers = Reserved.remote()
    ray.get(workers.ready.remote())
    assert in_lock_step(source, 130) == [130, 130]
    ray.kill(workers)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("start", [0, 5])
def test_tasks_of_every_world_size_give_the_same_run(folder, world, start):
    """Without Ray: what the tasks of all ranks yield, in turn."""
    source = source_of(folder / "damaged")
    ranks = []
    for rank in range(world):
        segments, found = Segments(source.plan, world, rank, start), []
        for segment in (segments[index] for index in range(len(segments))):
            for step in segment_steps(source, segments.groups, segment):
                bad = stream._bad_rows(step["bad"])
                found.append((segment.epoch, step["crops"], step["position"], step["row"], bad))
        ranks.append(found)
    assert_is_the_run(source, ranks, start)


def test_a_tree_of_files_streams_over_a_chain_of_pipelines_in_order(cluster, folder, monkeypatch):
    """Three epochs of one task each, two tasks a pipeline: the seam shows nothing."""
    monkeypatch.setattr(stream, "TASKS_PER_PIPELINE", 2)
    source = source_of(folder / "tree", batch=48, group=6, steps=30)
    assert len(Segments(source.plan, 1, 0, 0)) == 3
    assert_is_the_run(source, [streamed(source, 1, 0, 0)], 0)


def at(address: str, source: Source) -> Source:
    """The same recipe and plan over the data at another address."""
    manifest = build_manifest(address, source.recipe.data.image_column)
    assert manifest.fingerprint == source.manifest.fingerprint and manifest.root != source.manifest.root
    return Source(manifest, source.recipe, source.plan)


def address_of(endpoint: str, bucket: str) -> str:
    return f"s3://{bucket}?scheme=http&endpoint_override={endpoint.removeprefix('http://')}"


@pytest.mark.parametrize("name,sizes", [("damaged", (256, 64, STEPS)), ("tars", (48, 6, 30)), ("tree", (48, 6, 13))])
def test_a_stream_from_object_storage_is_the_one_from_disk_bit_for_bit(cluster, bucket, folder, name, sizes):
    source = source_of(folder / name, *sizes)
    remote = at(address_of(bucket.endpoint, name), source)
    assert_is_the_run(source, [streamed(remote, 1, 0, 4)], 4)


def test_a_storage_that_stumbles_changes_nothing_and_one_that_refuses_stops_the_run(cluster, bucket, folder):
    source = source_of(folder / "good", steps=3)
    with FaultProxy(bucket.endpoint) as proxy:
        remote = at(address_of(proxy.endpoint, "good"), source)
        proxy.clear()
        proxy.fault("GET", "/1.parquet", "503", times=3)
        proxy.fault("GET", "/2.parquet", "reset", times=2)
        proxy.fault("GET", "/3.parquet", "cut", times=1)
        assert_is_the_run(source, [streamed(remote, 1, 0, 0)], 0)
        seen = [outcome for name in "123" for outcome in proxy.outcomes("GET", f"/{name}.parquet")]
        assert (seen.count("503"), seen.count("reset"), seen.count("cut")) == (3, 2, 1), "the faults happened"
        proxy.fault(None, "/2.parquet", "403", times=None)
        with pytest.raises(UserError, match=r"s3://good/2.parquet cannot be read .*ACCESS_DENIED.*check AWS_ACC") as caught:
            streamed(remote, 1, 0, 0)
        assert "\n" not in str(caught.value)


def test_a_batch_is_a_block_in_shared_memory_and_not_a_copy(cluster, folder, monkeypatch):
    seen = []
    keep = stream._tensor
    monkeypatch.setattr(stream, "_tensor", lambda array: seen.append(array) or keep(array))
    source = source_of(folder / "good", steps=3, augment={"image_pixels": 32})
    for batch in stream.batches(source.manifest, source.recipe, source.plan, 1, 0, 0, head_start=False):
        assert batch.crops.shape == (256, 2, 32, 32, 3) and batch.crops.dtype == torch.uint8
    assert len(seen) == 4 * 3 and not any(array.flags.writeable or array.flags.owndata for array in seen)


@pytest.mark.parametrize("tasks_in_flight", [1, 2])
@pytest.mark.parametrize("ready_after", [0, 3, 7, 8, 19, 99])
def test_a_rank_makes_steps_itself_until_the_tasks_have_theirs_and_no_step_is_missed_or_repeated(
    monkeypatch, ready_after, tasks_in_flight
):
    ready, made, started_at = threading.Event(), [], []

    def pipeline(work, shape, part):
        started_at.append(len(made))
        ready.wait(30)
        return ({"who": "tasks", "step": step, "task": [task]} for task in part for step in range(8 * task + 8, 8 * task + 16))

    def own():
        for step in range(32):  # as many as the tasks make, and the eight before
            if step == ready_after:
                ready.set()
                time.sleep(0.2)
            made.append(step)
            yield {"who": "rank", "step": step}
        ready.set()

    monkeypatch.setattr(stream, "_start_pipeline", pipeline)
    monkeypatch.setattr(stream, "TASKS_PER_PIPELINE", 2)
    stretched = stream.in_order(None, 3, lambda: stream.Shape(1, 1, tasks_in_flight, 1.0), stream.OwnSteps(own(), ahead=8))
    first = next(stretched)
    time.sleep(0.2)  # the first step is computed
    assert started_at == ([] if tasks_in_flight == 1 else [0])
    found = [first, *stretched]
    assert [columns["step"] for columns in found] == list(range(32))
    own_steps = [columns["step"] for columns in found if columns["who"] == "rank"]
    assert own_steps == made == list(range(min(max(ready_after + 1, 8), 32)))


def test_a_damaged_first_file_is_told_by_the_rank_itself(cluster, folder, tmp_path):
    shutil.copytree(folder / "good", tmp_path / "gone")
    source = source_of(tmp_path / "gone")
    os.remove(tmp_path / "gone" / "2.parquet")
    with pytest.raises(UserError, match="gone/2.parquet cannot be read .*: put it back"):
        streamed(source, 1, 0, 0, head_start=True)


def test_labelled_images_come_in_the_order_asked_for_without_the_damaged_ones(cluster, folder):
    source = source_of(folder / "damaged", evaluation={"resize_pixels": 10})
    rows = np.random.default_rng(0).permutation(ROWS)[:1200]
    rows = np.concatenate([rows[~np.isin(rows, list(BAD))], [100, 1500]])  # the damaged ones last
    found = list(stream.labelled_images(source.manifest, source.recipe, rows, 100))
    assert np.concatenate([batch.rows for batch in found]).tolist() == rows[:-2].tolist()
    assert np.concatenate([batch.labels for batch in found]).tolist() == (rows[:-2] % 10).tolist()
    expected = np.stack([centre_crop(decode(picture(row), 1000), 10, 8) for row in rows[:-2]])
    assert (np.concatenate([batch.crops for batch in found]) == expected).all()
    bad = [(one.position, one.row) for batch in found for one in batch.bad]
    assert bad == [(len(rows) - 2, 100), (len(rows) - 1, 1500)]
    assert [len(batch.rows) + len(batch.bad) for batch in found[:-1]] == [100] * (len(found) - 1)


def test_a_mistake_in_a_task_reaches_the_rank_as_one_line(cluster, folder, tmp_path):
    shutil.copytree(folder / "good", tmp_path / "gone")
    source = source_of(tmp_path / "gone")
    os.remove(tmp_path / "gone" / "2.parquet")
    with pytest.raises(UserError, match="gone/2.parquet cannot be read .*: put it back") as caught:
        streamed(source, 1, 0, 0)
    assert "\n" not in str(caught.value)
    other = source_of(folder / "good", evaluation={"label_column": "kind"})
    with pytest.raises(UserError, match="has no column 'kind'; name one of image, label as evaluation.label_column"):
        list(stream.labelled_images(other.manifest, other.recipe, np.array([0]), 10))


def test_a_window_without_one_image_is_an_error_that_says_so(tmp_path):
    pq.write_table(pa.table({"image": [b"junk"] * 300}), tmp_path / "a.parquet")
    source = source_of(tmp_path, steps=1)
    with pytest.raises(UserError, match=r"none of the 64 rows around a.parquet row group 0 row \d+ can be decoded"):
        next(segment_steps(source, range(4), Segments(source.plan, 1, 0, 0)[0]))


def test_rows_that_the_plan_does_not_expect_are_refused(folder):
    source = source_of(folder / "good")
    segments = Segments(source.plan, 4, 1, 0)
    (first, second, *_) = segment_steps(source, segments.groups, segments[0])
    assert stream._batch(first, segments, 0).positions.tolist() == list(range(64, 128))
    backwards = {name: values[::-1] for name, values in first.items()}
    short = {name: values[:9] for name, values in first.items()}
    for columns in (second, backwards, short):
        with pytest.raises(RuntimeError, match="rows out of order at step 0: expected 64 rows from"):
            stream._batch(columns, segments, 0)
    other_epoch = first | {"step": first["step"] + source.plan.steps_per_epoch}
    with pytest.raises(RuntimeError, match="rows out of order at step 0"):
        stream._batch(other_epoch, segments, 0)


def test_more_ranks_than_groups_are_refused_before_anything_starts(folder):
    source = source_of(folder / "good")
    with pytest.raises(UserError, match="more workers than the 4 BatchNorm groups"):
        next(stream.batches(source.manifest, source.recipe, source.plan, 5, 0, 0))


def test_bench_input_measures_each_stage_and_says_which_holds_back(cluster, folder, tmp_path):
    recipe = source_of(folder / "damaged", steps=10**9, augment={"image_pixels": 32}, data={"uri": str(folder / "damaged")}).recipe
    result = bench_input(recipe, seconds=1.0, target_rate=5000.0)
    assert list(result["stages"]) == ["fetch", "decode", "crop", "colour", "transport"]
    for stage in result["stages"].values():
        assert stage["milliseconds"] > 0 and stage["images_per_second"] == pytest.approx(1000 / stage["milliseconds"])
    assert result["sampled_images"] == 1024 and 0 < result["bad_images"] < 30 and result["plane"]["images"] >= 256
    write_json(result, tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == json.loads(json.dumps(result))
    with pytest.raises(UserError, match="cannot be written .*; name a file in a folder that exists"):
        write_json(result, tmp_path / "none" / "bench.json")


def test_the_report_of_bench_input_adds_its_figures_up():
    stages = {"fetch": 0.5, "decode": 1.5, "crop": 1.0, "colour": 2.0, "transport": 0.2}
    text = as_text({
        "data": "s3://b/p", "layout": "tar", "rows": 1000, "mean_image_bytes": 100_000, "sampled_images": 100, "bad_images": 3,
        "image_pixels": 224, "cores": 4, "target_images_per_second": 1500,
        "stages": {n: {"milliseconds": ms, "images_per_second": 1000 / ms, "where": "here"} for n, ms in stages.items()},
        "plane": {"images_per_second": 1280, "images": 9, "seconds": 1.0},
    })  # fmt: skip
    assert "the plane reaches 80% of what 4 cores could decode and crop" in text  # 1280 * 2.5 ms / 4
    assert "a data task spends most on decode: 50% of its time" in text
    assert "for 1,500 images/s: 4 cores like these for decode and crop, and 150 MB/s from the storage" in text
    assert "warning: 3 of 100 images could not be decoded" in text


@pytest.mark.parametrize("name", ["good", "tars"])
def test_a_large_survey_by_tasks_of_ray_finds_what_threads_find(cluster, folder, tmp_path, monkeypatch, name):
    store = Store.at(str(folder / name))
    expected = survey.index_manifest(store, find_data(store), "image")
    calls = []
    monkeypatch.setattr(survey, "LARGE_FILES", 2)
    monkeypatch.setattr(survey, "LARGE_TAR_BYTES", 1)
    monkeypatch.setattr(survey, "FILES_PER_TASK", 4)
    spread = lambda read, tasks: calls.append(len(tasks)) or on_ray.spread(read, tasks)  # noqa: E731
    found = survey.index_manifest(store, find_data(store), "image", spread)
    assert found == expected and found.names.to_pylist() == expected.names.to_pylist()
    assert calls == [2 if name == "good" else 3], "six shards in tasks of four, three tars one by one"
    monkeypatch.setattr(on_ray, "TASKS_IN_FLIGHT", 1)
    (tmp_path / "a.tar").write_text("no tar at all, but long enough to be looked at" * 30)
    broken = Store.at(str(tmp_path))
    with pytest.raises(UserError, match="a.tar is no tar .*; write it again or remove it") as caught:
        survey.index_manifest(broken, find_data(broken), "image", spread)
    assert "\n" not in str(caught.value)


def test_what_killed_pipelines_asked_an_autoscaler_for_is_forgotten_and_nothing_else(cluster):
    keep_helpers_here()
    coordinator = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
    ours, others = f"data-{on_ray.pipeline_name()}_1_0", "data-dataset_2_0"

    def known() -> list[str]:
        return ray.get(coordinator.__ray_call__.remote(lambda self: list(self._ongoing_reqs)))

    def asked_for() -> set[str]:
        return {ours, others} & set(known())

    for name in (ours, others):
        ray.get(coordinator.request_resources.remote(requester_id=name, resources=[{"CPU": 0.1}], expire_after_s=180))
    forget_pipelines(30)
    assert asked_for() == {ours, others}  # it may be alive
    forget_pipelines(0)
    assert asked_for() == {others}
    ray.get(coordinator.cancel_request.remote(others))
    columns = stream.in_order(lambda task: iter([{"crops": np.zeros((1, 1))}] * 50), 20, lambda: stream.Shape(1, 8, 1, 0.1))
    next(columns)
    assert any(name.startswith(f"data-{on_ray.pipeline_name()}_") for name in known()), "pipelines go by another name"
    columns.close()
