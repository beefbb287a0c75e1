"""`moco-ray doctor RECIPE`: a right set-up fails nothing, and each wrong one fails exactly the check of its name.

The checks are real; what a cluster tells is made up, but for the last test, which is the command as its user runs it, on a Ray of its own.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from moco_ray import doctor as doctor_module
from moco_ray.checks import images, machines, step, storage
from moco_ray.checks.finding import Finding, as_table, exit_code, failed, mistake
from moco_ray.checks.node import versions
from moco_ray.cli import main
from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.data.segment import Source
from moco_ray.data.survey import build_manifest
from moco_ray.errors import StorageFailing, UserError
from moco_ray.launch_doctor import cause_of
from moco_ray.leak_probe import Leak
from moco_ray.learner import Learner
from moco_ray.placement import DataPlace
from moco_ray.plan import Plan, Workers
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.session import Room
from moco_ray.trial import Memory, Trial, fullest, trial, trial_plan
from tests import synthetic
from tests.object_stores import filled, use
from tests.shell import Shell
from tests.test_learning import rows_without_ray

RECIPE = """
[encoder]
backbone = "resnet10"
feature_dim = 32
[contrast]
queue_keys = 64
key_momentum = 0.99
[batch]
global_batch_size = 32
bn_group_size = 4
[optimizer]
learning_rate = 0.004
[schedule]
epochs = 40
[augment]
image_pixels = 32
blur_probability = 0.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """640 drawn images, and a recipe that suits them."""
    folder = tmp_path_factory.mktemp("set-up")
    drawn_prototypes(folder / "drawn", rows=640, test_rows=40, pixels=32)
    (folder / "small.toml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def healthy(folder) -> Trial:
    """The two steps of the right set-up, in this process."""
    torch.set_num_threads(1)
    manifest = build_manifest(str(folder / "drawn" / "train"), "image")
    plan_ = trial_plan(Plan(Recipe.read(folder / "small.toml"), manifest.rows))
    found = trial(Learner.new(plan_.recipe), rows_without_ray(Source(manifest, plan_.recipe, plan_)), plan_, Ranks())
    low, high = step.first_loss(plan_, found.positive_similarity)
    assert low - 0.1 < found.loss < high + 0.1
    return found


class Cluster:
    """What Ray would tell of two machines like this one, and what two workers would find; each part can be made wrong."""

    def __init__(self, found: Trial):
        self.trial: Trial | Exception = found
        self.loss: float | None = None  # None: what it ought to be
        self.wrong: dict[str, dict] = {"node1": {}, "node2": {}}  # what a node tells otherwise
        self.silent: dict[str, Exception] = {}
        self.resources = {"CPU": 8.0, "GPU": 0.0, "object_store_memory": 2.0**32}
        self.refusals: list[UserError] = []  # of the next sessions
        self.free = 4

    @contextlib.contextmanager
    def session(self, workers, debug=False):
        if self.refusals:
            raise self.refusals.pop(0)
        cluster = self

        class FourCpus(Room):
            def fits_now(self):
                return cluster.free

            def data_place(self, workers):
                return DataPlace(4.0)

        yield FourCpus(1, {"CPU": 1.0})

    def ask(self, question, seconds):
        here = question("127.0.0.1")._replace(interface="eth0", interface_address="10.0.0.1")
        return {name: self.silent.get(name) or here._replace(**{"machine": name} | self.wrong[name]) for name in self.wrong}

    def of_nodes(self, kind):
        return dict.fromkeys(self.wrong, self.resources[kind] / 2)

    def carry(self, manifest, plan_, workers, room, debug):
        if isinstance(self.trial, Exception):
            raise self.trial
        loss = self.loss if self.loss is not None else sum(step.first_loss(plan_, self.trial.positive_similarity)) / 2  # of that queue
        return self.trial._replace(loss=loss, world=workers)


@pytest.fixture
def cluster(folder, healthy, tmp_path, monkeypatch):
    cluster = Cluster(healthy)
    monkeypatch.chdir(folder)
    for name, instead in (("ray_session", cluster.session), ("ask_each_node", cluster.ask), ("of_nodes", cluster.of_nodes), ("carry_trial", cluster.carry)):
        monkeypatch.setattr(doctor_module, name, instead)
    return cluster


def findings(*overrides: str, data: str = "drawn/train", workers: str = "2", storage_uri: str = "runs") -> list[Finding]:
    recipe = Recipe.read("small.toml", [f"data.uri={data}", *overrides])
    return doctor_module.doctor(recipe, storage_uri, Workers.of(workers))


def of(found: list[Finding], status: str) -> list[str]:
    return [finding.name for finding in found if finding.status == status]


def only(found: list[Finding], name: str, told: str) -> Finding:
    """The one finding that failed, whose text or cure holds `told`."""
    assert of(found, "failed") == [name], [f for f in found if f.status == "failed"]
    finding = next(f for f in found if f.name == name and f.status == "failed")
    assert told in f"{finding.found} | {finding.cure}" and finding.cure, finding
    return finding


# The right set-up


def test_a_right_set_up_fails_nothing_warns_of_nothing_and_leaves_nothing_behind(cluster):
    found = findings()
    assert of(found, "failed") == of(found, "warning") == of(found, "skipped") == [], found
    assert len({finding.name for finding in found}) == len(found) == 29
    assert not Path("runs").exists() and sorted(p.name for p in Path(".").iterdir()) == ["drawn", "small.toml"]


def test_the_command_prints_the_table_or_json_and_leaves_with_0_or_1(cluster, capsys):
    words = ["doctor", "small.toml", "--data", "drawn/train", "--workers", "2"]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["check", "result", "found"] and "nothing failed, 0 warnings, 0 skipped, 29 ok" in table
    assert main([*words, "--json", "contrast.queue_keys=6400"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and {"name", "status", "found", "cure"} == told["checks"][0].keys()
    assert [one["name"] for one in told["checks"] if one["status"] == "failed"] == ["queue"]


@pytest.mark.parametrize(
    "words,told",
    [
        (["missing.toml", "--data", "drawn/train"], "no recipe at missing.toml"),
        (["small.toml"], "no data set: give --data FOLDER"),
        (["small.toml", "--data", "drawn/train", "optimizer.learningrate=1"], "the nearest known one is"),
        (["small.toml", "--data", "drawn/train", "--workers", "few"], "give a number"),
        (["small.toml", "--data", "drawn/train", "--storage", "s3://key:secret@bucket/x"], "credentials in a URI"),
        (["drawn"], "drawn is neither a recipe (a TOML file) nor a run folder"),
    ],
)
def test_what_makes_no_sense_to_ask_is_a_mistake_of_one_line(cluster, capsys, words, told):
    assert main(["doctor", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("..")]
    assert line.startswith("moco-ray: error: ") and told in line


def test_the_folder_of_a_run_goes_to_the_report_of_runs(cluster, tmp_path, monkeypatch, capsys):
    (tmp_path / "run.json").write_text("{}")
    asked = []
    monkeypatch.setitem(sys.modules, "moco_ray.doctor_run", module := ModuleType("moco_ray.doctor_run"))
    module.report = lambda place, as_json: asked.append((place, as_json)) or 1
    assert main(["doctor", str(tmp_path), "--json"]) == 1 and asked == [(str(tmp_path), True)]
    assert main(["doctor", str(tmp_path), "--workers", "2"]) == 2 and "takes no workers" in capsys.readouterr().err


# Recipe and data, one thing wrong at a time


@pytest.mark.parametrize(
    "overrides,name,told",
    [
        (["contrast.queue_keys=6400"], "queue", "6400 is not smaller than the data set's 640 rows"),
        (["contrast.queue_keys=320", "schedule.epochs=0", "schedule.steps=9"], "queue fill", "fill the queue 0.90 times"),
        (["batch.bn_group_size=32", "batch.allow_batchnorm_leak=true"], "BatchNorm groups", "batch norm leaks, whatever the shuffle"),
        (["contrast.key_momentum=1"], "key momentum", "never moves"),
        (["optimizer.learning_rate=30"], "learning rate", "8e+03 times the linear rule's 0.00375"),
        (["evaluation.bank_uri=drawn/test", "evaluation.query_uri=drawn/test"], "evaluation sets", "neighbours 200 is more than the 40 rows"),
        (["batch.global_batch_size=1024"], "data", "640 rows, fewer than batch.global_batch_size 1024"),
    ],
)
def test_each_mistake_of_recipe_and_data_is_named_alone(cluster, overrides, name, told):
    workers = "1" if name == "BatchNorm groups" else "2"
    only(findings(*overrides, workers=workers), name, told)


@pytest.mark.parametrize(
    "overrides,name",
    [
        (["contrast.queue_keys=400"], "queue"),
        (["contrast.queue_keys=320", "schedule.epochs=0", "schedule.steps=15"], "queue fill"),
        (["batch.bn_group_size=8"], "BatchNorm groups"),
        (["batch.shuffle_domain_groups=2"], "BatchNorm groups"),
        (["contrast.key_momentum=0.9"], "key momentum"),
        (["optimizer.learning_rate=0.1"], "learning rate"),
    ],
)
def test_what_may_be_meant_is_a_warning_with_a_cure(cluster, overrides, name):
    found = findings(*overrides)
    assert (of(found, "failed"), of(found, "warning")) == ([], [name]) and exit_code(found) == 0
    assert next(finding for finding in found if finding.name == name).cure


def test_too_many_workers_are_named_and_an_uneven_number_is_a_warning(cluster):
    found = findings(workers="9")
    assert "more workers than the 8 BatchNorm groups" in only(found, "workers", "at most 8 workers").found
    assert {"room", "object store", "one step", "batch norm leak"} <= set(of(found, "skipped"))
    found = findings(workers="7")
    assert of(found, "warning") == ["workers", "room"] and "57% of their time" in next(f.found for f in found if f.name == "workers")


def test_a_data_set_that_is_not_there_is_named_and_what_hangs_on_it_is_skipped(cluster):
    found = findings(data="nowhere")
    only(found, "data", "nowhere does not exist")
    assert {"recipe", "images", "duplicates", "object store", "one step"} <= set(of(found, "skipped"))


def tree(folder: Path, count: int, spoilt: int, alike: int) -> str:
    """Noise as PNGs, some of them cut off in the middle, some equal."""
    folder.mkdir()
    for number in range(count):
        noise = np.random.default_rng(max(number, alike)).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(noise).save(path := folder / f"{number}.png")
        if number < spoilt:
            path.write_bytes(path.read_bytes()[:1000])
    return str(folder)


def test_images_that_do_not_decode_are_counted_by_kind(cluster, tmp_path):
    found = findings("contrast.queue_keys=32", data=tree(tmp_path / "spoilt", 320, 80, 0))
    finding = only(found, "images", "truncated")
    assert "of 64 drawn images do not decode" in finding.found and ".png" in finding.found and "pack" in finding.cure
    assert set(of(found, "skipped")) == set(step.NAMES)
    few = findings("contrast.queue_keys=32", data=tree(tmp_path / "few", 64, 1, 0))
    only(few, "images", "1 of 64")  # all there are: more than data.max_bad_rows_fraction
    assert of(findings("contrast.queue_keys=32", "data.max_bad_rows_fraction=0.1", data=str(tmp_path / "few")), "warning") == ["images"]


def test_so_many_bad_images_as_chance_explains_are_no_failure():
    assert images.chance_of(1, 64, 0.01) == pytest.approx(1 - 0.99**64)
    assert images.chance_of(3, 64, 0.01) > images.SURE > images.chance_of(4, 64, 0.01)


def test_equal_images_are_counted(cluster, tmp_path):
    only(findings("contrast.queue_keys=32", data=tree(tmp_path / "alike", 320, 0, 40)), "duplicates", "41 of 320 drawn images equal")
    rows = 10_000
    rare = images.duplicates({row: bytes([row % 249]) * 9 for row in range(250)}, rows)
    assert rare.status == "warning" and f"about {(rows - 1) / (250 * 249 / 2):.2g} twins" in rare.found


def test_the_sample_reads_few_pieces_of_a_large_set():
    rows = np.full(10_000, 128)
    large = SimpleNamespace(chunk_rows=rows, chunk_bytes=rows * 110_000, first_row=np.concatenate([[0], np.cumsum(rows)]))
    sample = images.sample_rows(large, 0)
    assert len(np.unique(sample)) == 1024 and len(np.unique(sample // 128)) == (256 << 20) // (128 * 110_000)
    small = SimpleNamespace(chunk_rows=rows, chunk_bytes=rows * 500, first_row=large.first_row)
    assert len(np.unique(images.sample_rows(small, 0) // 128)) == 64


# Storage


def test_a_storage_that_cannot_be_written_is_named(cluster, tmp_path):
    (tmp_path / "file").write_text("")
    found = findings(storage_uri=str(tmp_path / "file" / "runs"))
    only(found, "storage", "cannot be written")
    assert of(found, "skipped") == ["one driver at a time"]


def test_refused_credentials_are_named_and_the_storage_is_not_blamed(cluster, moto, no_aws, monkeypatch):
    bucket = filled(moto, {})
    use(monkeypatch, moto, AWS_SECRET_ACCESS_KEY="wrong")
    found = findings(storage_uri=f"s3://{bucket}/runs")
    only(found, "credentials", "check AWS_ACCESS_KEY_ID")
    assert of(found, "skipped") == ["storage", "one driver at a time"]


@pytest.mark.parametrize("server,warned", [("moto", []), ("rclone", ["one driver at a time"])])
def test_in_object_storage_the_probe_is_removed_and_conditional_writes_are_tried(cluster, request, no_aws, monkeypatch, server, warned):
    server = request.getfixturevalue(server)
    use(monkeypatch, server)
    bucket = filled(server, {"runs/other": b"1"})
    found = findings(storage_uri=f"s3://{bucket}/runs")
    assert of(found, "failed") == [] and of(found, "warning") == warned
    assert "environment variables" in next(f.found for f in found if f.name == "credentials")
    assert [held["Key"] for held in server.client().list_objects_v2(Bucket=bucket)["Contents"]] == ["runs/other"]


def test_a_disk_without_room_for_checkpoints_is_named(cluster, monkeypatch):
    real = storage.shutil.disk_usage
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: real(path)._replace(free=10**8))
    only(findings("run.keep_checkpoints=10"), "disk space", "10 checkpoints and one in the making")


def test_a_clock_is_judged_by_how_far_it_lies_outside_of_the_question(cluster):
    assert [storage.outside(moment, 10, 12) for moment in (11, 15, 4)] == [0, 3, -6]
    assert storage.clock({"the storage": -30}).status == "warning" and "behind" in storage.clock({"a": -90, "b": 1}).found
    assert storage.clock({"the storage": None}).status == "skipped"
    cluster.wrong["node2"] = {"time": 1e9}
    only(findings(), "clock", "node2 is")


# Machines


@pytest.mark.parametrize(
    "wrong,name,told",
    [
        ({"shared_memory_bytes": 64 << 10}, "shared memory", "/dev/shm of node2 has 64 KiB free"),
        ({"versions": versions() | {"torch": "2.13"}}, "versions", "torch 2.13 on node2"),
        ({"interface": "", "interface_address": "127.0.1.1"}, "network", "GLOO_SOCKET_IFNAME"),
        ({"interface_address": ""}, "network", "eth0 (no address)"),
        ({"open_files": 256}, "open files", "256 on node2"),
        ({"can_listen": "Cannot assign requested address"}, "ports", "no process can listen on node2"),
        ({"unread": "s3://b/x cannot be read (AccessDenied); check it"}, "reach", "node2 cannot read the data: s3://b/x cannot be read (AccessDenied)"),
        ({"unshared": "/runs/seen does not exist; mount it"}, "reach", "a folder must be shared by all nodes"),
    ],
)  # fmt: skip
def test_each_fault_of_one_of_two_machines_is_named_with_the_machine(cluster, wrong, name, told):
    cluster.wrong["node2"] = wrong
    only(findings(), name, told)


def test_nodes_of_one_machine_may_meet_on_its_loopback(cluster):
    cluster.wrong = dict.fromkeys(cluster.wrong, {"machine": "one", "interface": "lo", "interface_address": "127.0.0.1"})
    assert of(findings(), "failed") == []


def test_a_machine_that_does_not_answer_is_named_and_no_step_is_taken(cluster):
    cluster.silent["node2"] = ModuleNotFoundError("No module named 'moco_ray'")
    found = findings()
    only(found, "nodes", "node2 cannot run moco_ray: No module named 'moco_ray'")
    assert of(found, "skipped") == list(step.NAMES) and "nodes" in found[-1].found


def test_emulated_bfloat16_is_named(cluster):
    cluster.wrong = {name: {"has_bfloat16": False} for name in cluster.wrong}
    only(findings("encoder.precision=bfloat16"), "precision", "encoder.precision=float32")
    assert machines.precision({"a": SimpleNamespace(has_bfloat16=False)}, Recipe.read("small.toml", ["encoder.precision=bfloat16"]), True).status == "ok"


def test_a_small_object_store_is_named(cluster):
    cluster.resources["object_store_memory"] = 1 << 20
    only(findings(), "object store", "spill to disk")


def test_gpus_are_counted_against_workers(cluster):
    cluster.wrong = {name: {"gpus": 1, "cuda_build": True} for name in cluster.wrong}
    assert of(findings(), "warning") == ["GPUs"]  # Ray knows of none
    cluster.resources["GPU"] = 2.0
    assert of(findings(), "warning") == of(findings(), "failed") == []
    only(findings(workers="4"), "GPUs", "Ray has 2 for 4 workers")
    assert of(findings(workers="2:4"), "failed") == []
    cluster.wrong["node2"] = {"gpus": 1, "cuda_build": False}
    only(findings(), "GPUs", "built without CUDA")


def test_without_room_for_the_workers_the_step_is_skipped_and_not_waited_for(cluster):
    cluster.refusals = [UserError("the Ray cluster has 1 CPUs: 2 workers of 1 leave none for reading data; use fewer --workers")]
    found = findings()
    only(found, "room", "leave none for reading data")
    assert set(of(found, "skipped")) == set(step.NAMES)
    cluster.free = 1  # others work there
    found = findings()
    assert (of(found, "warning"), of(found, "skipped")) == (["room"], list(step.NAMES)) and "would wait for more" in found[-1].found
    assert of(findings(workers="1:2"), "skipped") == []


def test_without_any_ray_this_machine_is_looked_at(cluster):
    cluster.refusals = [UserError("no Ray cluster answers at RAY_ADDRESS x; start it, or unset the variable")] * 2
    found = findings()
    only(found, "room", "no Ray cluster answers")
    assert set(of(found, "skipped")) == {"nodes", "object store", "shared memory", *step.NAMES}


def test_a_taken_port_of_tensorboard_is_only_a_warning(cluster):
    with mock.patch("moco_ray.checks.node._listening", lambda address, port=0: "Address already in use" if port else ""):
        assert of(findings(), "warning") == ["ports"]


# The step


@pytest.mark.parametrize(
    "changes,name,told",
    [
        ({"loss": 9.0}, "one step", "an untrained network"),
        ({"loss": float("nan")}, "one step", "loss nan"),
        ({"queues_equal": False}, "queues equal", "different dictionaries"),
        ({"leak": Leak(4, 4, 1, 4)}, "batch norm leak", "batch norm leaks: one altered image moves 4 keys, 4 of them"),
        ({"leak": Leak(32, 4, 1, 4)}, "batch norm leak", "keys of other BatchNorm groups move too"),
        ({"memory": Memory("GPU 0", 79 << 30, 80 << 30)}, "memory", "79 GiB of 80 GiB at the peak, on GPU 0"),
    ],
)
def test_each_fault_of_the_step_is_named(cluster, healthy, changes, name, told):
    cluster.loss = changes.pop("loss", None)
    cluster.trial = healthy._replace(**changes)
    only(findings(), name, told)


def test_a_step_that_fails_is_told_in_one_line_and_the_rest_of_it_is_skipped(cluster):
    cluster.trial = UserError("CUDA out of memory. Tried to allocate 2 GiB; run.groups_per_forward=1 computes the same in less memory")
    found = findings()
    assert only(found, "one step", "out of memory").cure.startswith("run.groups_per_forward=1")
    assert of(found, "skipped") == list(step.NAMES[1:])


def test_memory_that_is_not_there_is_told_with_its_cure():
    for text in ("DefaultCPUAllocator: can't allocate memory: you tried", "CUDA out of memory. Tried"):
        assert "; run.groups_per_forward=1" in cause_of(RuntimeError(text))
    assert cause_of(RuntimeError("x")).startswith("x; with --debug")


def probed(ranks: Ranks, spoil: bool) -> Trial:
    torch.set_num_threads(1)
    recipe = synthetic.recipe(contrast={"queue_keys": 4000}, encoder={"feature_dim": 64})
    plan_ = trial_plan(synthetic.plan(recipe))
    learner = synthetic.small_learner(plan_.recipe)
    if spoil and ranks.rank == 1:
        learner.queue.keys[3000, 3] += 1e-12  # not overwritten by two steps
    return trial(learner, synthetic.batches(plan_, ranks), plan_, ranks)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_two_steps_on_any_number_of_ranks_tell_the_same_and_the_first_loss_lies_within_its_bounds(pool, world):
    found = pool.run(world, probed, False)
    assert len(set(found)) == 1 and found[0].world == world and found[0].queues_equal and not found[0].leak.leaks
    low, high = step.first_loss(synthetic.plan(synthetic.recipe(contrast={"queue_keys": 4000}, encoder={"feature_dim": 64})), found[0].positive_similarity)
    assert low - 0.01 < found[0].loss < high + 0.05 and high - low < 0.25  # some queries are alike: their noise does not average out
    assert found[0].loss == pytest.approx(pool.run(1, probed, False)[0].loss, abs=1e-9)


def test_one_changed_bit_in_the_queue_of_one_rank_is_seen_by_all(pool):
    assert [found.queues_equal for found in pool.run(2, probed, True)] == [False, False]


def test_the_bound_of_the_first_loss_is_that_of_random_vectors():
    """E exp(s/T) over the sphere, by drawing a million: 0.2 % of it is the draw's own error."""
    recipe = synthetic.recipe(contrast={"queue_keys": 1000, "temperature": 0.2}, encoder={"feature_dim": 16})
    first = np.random.default_rng(0).normal(size=(1_000_000, 16))
    mean = np.exp(first[:, 0] / np.linalg.norm(first, axis=1) / 0.2).mean()
    assert step.first_loss(synthetic.plan(recipe), 0.5)[1] == pytest.approx(np.log(1 + 1000 * mean * np.exp(-2.5)), abs=0.01)


def test_ranks_on_one_machine_share_its_memory():
    one, two = Memory("a", 3, 10), Memory("b", 4, 10)
    assert fullest([one, two, one]) == Memory("a", 6, 10)


def test_the_trial_begins_at_the_run_s_own_rate_and_keeps_its_batch():
    recipe = synthetic.recipe(schedule={"steps": 100, "warmup_steps": 10})
    made = trial_plan(Plan(recipe, 300))
    assert made.total_steps == 2 and made.recipe.optimizer.learning_rate == pytest.approx(0.001) and made.recipe.batch == recipe.batch


# The table


def test_the_table_wraps_at_its_width_with_the_cure_under_its_row():
    rows = [Finding("one", "ok", "word " * 40), failed("a longer name", "what is wrong", "do " * 40), mistake("c", StorageFailing("x is y (z; z); cure it"))]
    lines = as_table(rows, 80).splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1] == "2 failed (a longer name, c), 0 warnings, 0 skipped, 1 ok"
    where = next(i for i, line in enumerate(lines) if "what is wrong" in line)
    assert "FAILED" in lines[where] and lines[where + 1].strip().startswith("cure: do do")
    assert rows[2] == Finding("c", "failed", "x is y (z; z)", "cure it")


# As its user runs it


def test_the_command_takes_two_steps_on_two_workers_of_a_real_ray(folder):
    shell = Shell(folder, {})
    try:
        code, out, error = shell.run("doctor", "small.toml", "--data", "drawn/train", "--workers", "2", "--storage", "kept", "--json")
    finally:
        shell.close()
    told = json.loads(out)
    rows = {one["name"]: one for one in told["checks"]}
    assert (code, told["ok"]) == (0, True) and len(rows) == 29, (out, error)
    assert {one["status"] for one in rows.values()} <= {"ok", "warning"}
    assert "on 2 workers: loss" in rows["one step"]["found"] and "dictionaries of 2 ranks are equal" in rows["queues equal"]["found"]
    assert "one altered image moves 4 keys, 1 of them" in rows["batch norm leak"]["found"]
    assert "Traceback" not in error and not (folder / "kept").exists() and os.path.isdir(folder)
