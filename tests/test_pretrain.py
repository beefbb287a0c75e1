"""The product as its user runs it: `moco-ray` in a process of its own, two Ray Train workers, a local Ray.

One run, streaming from a real S3 server and kept in it, is interrupted as a person does it, resumed, looked at and evaluated. Few Ray
runs that each prove much.
"""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moco_ray import checkpoint
from moco_ray.attempts import all_of
from moco_ray.backbone import read_backbone, read_checkpoint
from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.data.storage import Store
from moco_ray.learner import Learner
from moco_ray.monitor import NOT_REPRODUCIBLE, read_metrics
from moco_ray.parts import NAMES
from moco_ray.standing import Standing
from tests.object_stores import rclone_server
from tests.shell import Shell
from tests.synthetic import identical
from tests.test_profile import steps_of

STEPS, SAVE, LOG, EPOCH = 120, 25, 10, 37  # 600 rows in batches of 16: 37 steps an epoch, 8 rows left out
RECIPE = f"""
[encoder]
backbone = "resnet10"
feature_dim = 32
[contrast]
queue_keys = 200
key_momentum = 0.99
[batch]
global_batch_size = 16
bn_group_size = 4
[schedule]
steps = {STEPS}
[augment]
image_pixels = 32
blur_probability = 0.0
[evaluation]
every_epochs = 1
neighbours = 5
resize_pixels = 32
bank_rows = 300
[run]
log_every_steps = {LOG}
checkpoint_every_steps = {SAVE}
keep_checkpoints = 2
"""
EVALUATED = [EPOCH, 2 * EPOCH, 3 * EPOCH, STEPS]
LOGGED = sorted({*range(LOG, STEPS + 1, LOG), *range(SAVE, STEPS, SAVE), *EVALUATED})


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    drawn_prototypes(folder / "drawn", rows=600, test_rows=200)
    (folder / "small.toml").write_text(RECIPE)
    (folder / "kept").mkdir()
    with rclone_server(folder) as store:  # its folder `drawn` is a bucket
        shell = Shell(folder, store.environment())
        yield shell
        shell.close()


LOCAL = ("--data", "drawn/train", "evaluation.bank_uri=drawn/train", "evaluation.query_uri=drawn/test")
SETS = ("--data", "s3://drawn/train", "evaluation.bank_uri=s3://drawn/train", "evaluation.query_uri=s3://drawn/test")


@pytest.fixture(scope="module")
def run(shell):
    """A run in S3 that was interrupted after its first checkpoint and resumed to its end: its folder and its outputs.

    The server keeps its buckets as folders: what it was given is looked at there.
    """
    folder = shell.folder / "kept" / "small"
    process = shell.start("pretrain", "small.toml", "--workers", "2", "--storage", "s3://kept", "--profile", "4", *SETS)
    wait_for_checkpoint(folder, process)
    process.send_signal(signal.SIGINT)
    first = process.communicate(timeout=120)
    reached = newest(folder).step
    assert process.returncode == 130 and reached < STEPS, (process.returncode, first)  # it was interrupted
    code, *second = shell.run("resume", "s3://kept/small")
    assert code == 0, second
    return folder, reached, first, second


def newest(folder: Path) -> checkpoint.Saved | None:
    return checkpoint.newest(Store(str(folder)))


def wait_for_checkpoint(folder: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while not newest(folder):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def test_an_interrupted_run_is_resumed_from_its_newest_checkpoint_and_every_step_appears_once(run):
    folder, reached, (out, error), (resumed_out, resumed_error) = run
    assert "run folder:" in out and "tensorboard --logdir" in out and "moco-ray resume" in error
    assert f"from step {reached}" in resumed_out and "finished" in resumed_out
    assert f"step {STEPS}/{STEPS}" in resumed_error and "img/s" in resumed_error and "kNN" in resumed_error
    assert "Traceback" not in error + resumed_error
    entries = read_metrics(folder / "metrics.jsonl")
    assert [e["step"] for e in entries if "loss" in e] == LOGGED
    assert [e["step"] for e in entries if "knn_top1" in e] == EVALUATED


def test_a_profile_that_was_asked_for_lies_in_the_storage_and_says_where_the_time_goes(run):
    folder, _, (_, error), (_, resumed_error) = run
    (trace,) = (folder / "tensorboard" / "profile").iterdir()
    assert trace.name == "attempt1.11.pt.trace.json" and len(steps_of(json.loads(trace.read_text()))) == 4
    (event,) = [e for e in map(json.loads, (folder / "events.jsonl").read_text().splitlines()) if e["kind"] == "profile"]
    assert event["text"] in error and "profile of steps 11 to 14 on worker 0" in error and "profile of" not in resumed_error
    assert "trace: s3://kept/small/tensorboard/profile/attempt1.11.pt.trace.json" in event["text"]
    assert all(event["seconds"][name] > 0 for name in NAMES)


def test_the_run_folder_holds_recipe_plan_commit_checkpoints_curves_and_nothing_half_written(run):
    folder, *_ = run
    run_store = Store(str(folder))
    assert [(a.number, a.workers, a.from_step) for a in all_of(run_store)] == [(1, 2, 0), (2, 2, run[1])]
    facts, plan = (json.loads((folder / name).read_text()) for name in ("run.json", "plan.json"))
    assert {"git_commit", "git_dirty", "versions", "data_fingerprint", "started"} <= facts.keys()
    assert (plan["total_steps"], plan["steps_per_epoch"], plan["dropped_rows_per_epoch"]) == (STEPS, EPOCH, 8)
    best = Standing.read(run_store).best
    assert {saved.step for saved in checkpoint.whole(run_store)} == {STEPS, EVALUATED[-2], best.step}
    state, about = checkpoint.load(run_store, newest(folder))
    assert (
        state["step"] == STEPS
        and about["recipe"] == (folder / "recipe.toml").read_text()
        and about["data_fingerprint"] == facts["data_fingerprint"]
    )
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.rglob("*.part"))


def test_evaluations_beside_the_training_land_at_their_steps_and_the_best_checkpoint_is_marked_and_kept(run):
    folder, _, (_, first), (_, second) = run
    found = {e["step"]: e for e in read_metrics(folder / "metrics.jsonl") if "knn_top1" in e}
    assert all(e["evaluation_seconds"] > 0 and e["knn_left_out"] == 0 for e in found.values())
    standing = Standing.read(Store(str(folder)))
    assert standing.waiting == () and standing.best.knn_top1 == max(e["knn_top1"] for e in found.values())
    assert standing.best.name in {saved.name for saved in checkpoint.whole(Store(str(folder)))}
    told = {e["step"]: e["text"] for e in read_metrics(folder / "events.jsonl") if e["kind"] == "evaluated"}
    assert sorted(told) == EVALUATED and "the best so far, kept: checkpoints/step-" in told[standing.best.step]
    assert all(text in first + second for text in told.values())
    by_name = read_checkpoint(f"{folder}/checkpoints/best.pt")
    assert by_name.saved.name == standing.best.name and by_name.saved.step == standing.best.step


def test_tensorboard_has_every_scalar_once_a_step_and_chance_beside_the_loss(run):
    folder, *_ = run
    scalars = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for tag in (
        "learning/loss", "learning/contrast_top1", "learning/contrast_top5", "learning/learning_rate",
        "dictionary/queue_fill", "dictionary/positive_similarity", "dictionary/negative_similarity",
        "input/images_per_second", "input/wait_share",
    ):  # fmt: skip
        assert [event.step for event in scalars.Scalars(tag)] == LOGGED, tag
    assert [event.step for event in scalars.Scalars("evaluation/knn_top1_backbone_features")] == EVALUATED
    chance = EventAccumulator(str(folder / "tensorboard" / "reference"), size_guidance={"scalars": 0}).Reload()
    assert {round(event.value, 3) for event in chance.Scalars("learning/loss")} == {5.303}  # log(201)


FOUR = ["raw pixels", "colour histogram", "untrained encoder", "trained encoder"]


def test_evaluate_judges_four_descriptions_alike_and_keeps_the_result_and_its_protocol(shell, run):
    folder, *_ = run
    code, out, error = shell.run("evaluate", "s3://kept/small", "evaluation.neighbours=5")
    assert code == 2 and "neighbours 200" not in error  # it takes no overrides: unrecognised words are refused
    code, out, error = shell.run("evaluate", "s3://kept/small")
    assert code == 0, error
    assert all(name in out for name in FOUR)
    held = json.loads((folder / "evaluation.json").read_text())
    assert held["step"] == STEPS and "200 queries, bank of 600" in held["about"]
    assert [row["name"] for row in held["rows"]] == FOUR
    assert held["backbone"]["sha256"] == newest(folder).sha256 and held["sets"]["queries"]["rows"] == 200
    assert held["protocol"]["labels_per_class"] == [1, 10] and held["protocol"]["neighbours"] == [10, 20, 100, 200]
    for row in held["rows"]:
        counts = row["linear"]["confusion"]
        assert sum(map(sum, counts)) == 200 and sum(counts[n][n] for n in range(len(counts))) == round(200 * row["linear"]["top1"])
    assert (folder / "confusion.png").stat().st_size > 5000 and held["markdown"] in (folder / "evaluation.md").read_text()


def test_an_exported_file_is_evaluated_where_its_run_is_not_and_a_set_against_itself_leaves_each_row_out(shell, run):
    code, out, error = shell.run("export", "s3://kept/small", "--to", "safetensors", "--output", "small.safetensors")
    assert code == 0, error
    code, out, error = shell.run(
        "evaluate", "small.safetensors", "--bank", "drawn/test", "--queries", "drawn/test", "--output", "judged"
    )
    assert code == 0 and "each image is judged by the others" in out, error
    held = json.loads((shell.folder / "judged" / "evaluation.json").read_text())
    assert held["protocol"]["leave_one_out"] and held["step"] == STEPS
    assert max(held["rows"][3]["knn"]["0.1"].values()) < 1.0 and all(row["linear"] is None for row in held["rows"])
    assert held["backbone"]["run"] == "s3://kept/small"


def test_a_run_begins_from_exported_weights_where_it_is_asked_to(shell, run):
    if not (shell.folder / "small.safetensors").exists():
        assert shell.run("export", "s3://kept/small", "--to", "safetensors", "--output", "small.safetensors")[0] == 0
    words = ("pretrain", "small.toml", "--name", "warm", "--data", "drawn/train", "schedule.steps=2", "evaluation.every_epochs=0")
    code, out, error = shell.run(*words, "--warm-start", "small.safetensors")
    assert code == 0, error
    folder = shell.folder / "runs" / "warm"
    given = read_backbone(str(folder / "warm-start.safetensors"))
    assert given.fingerprint() == read_backbone(str(shell.folder / "small.safetensors")).fingerprint()
    own = read_checkpoint(str(folder))
    drawn = Learner.new(own.recipe).f_q.backbone.state_dict()["conv1.weight"]
    weight = own.backbone().tensors["conv1.weight"]
    assert own.recipe.encoder.warm_start == given.fingerprint()
    assert 0 < (weight - given.tensors["conv1.weight"]).norm() < 0.2 * (weight - drawn).norm()
    code, out, error = shell.run(*words)
    assert code == 2 and "already holds a run of another recipe (encoder.warm_start" in error


def test_neighbours_of_unlabelled_rows_are_a_sheet_and_points_of_the_projector(shell, run):
    folder, *_ = run
    code, out, error = shell.run("neighbours", "s3://kept/small", "--rows", "200", "--queries", "5", "--nearest", "4", "--map")
    assert code == 0 and "200 points, 200 of them as images" in out and "5 queries, each with its 4 nearest of 200 images" in out, error
    for name in ("neighbours.png", "map.png"):
        with Image.open(folder / name) as sheet:
            assert sheet.size[0] > 500 and sheet.size[1] > 500
    held = folder / "tensorboard" / f"neighbours-step-{STEPS}"
    (tensors,) = held.rglob("tensors.tsv")
    assert len(tensors.read_text().splitlines()) == 200 and list(held.rglob("sprite.png")) and (held / "projector_config.pbtxt").exists()
    images = EventAccumulator(str(held), {"images": 0}).Reload()
    assert [event.step for event in images.Images("neighbours")] == [STEPS]
    code, out, error = shell.run("neighbours", "s3://kept/small", "--rows", "4", "--nearest", "8")
    assert code == 2 and "too few for --nearest 8" in error


@pytest.mark.slow
def test_runs_from_object_storage_interrupted_or_killed_equal_one_from_disk_that_never_stopped(shell, run):
    folder, *_ = run
    code, out, error = shell.run("pretrain", "small.toml", "--workers", "2", "--name", "straight", *LOCAL)
    assert code == 0, error
    killed = shell.folder / "runs" / "killed"
    process = shell.start("pretrain", "small.toml", "--workers", "2", "--name", "killed", *SETS)
    wait_for_checkpoint(killed, process)
    shell.kill(process)
    assert process.returncode == -signal.SIGKILL and newest(killed).step < STEPS
    code, out, error = shell.run("resume", "runs/killed")
    assert code == 0, error
    resumed, after_kill, straight = (
        # by step: an evaluation beside the training lands some lines behind its own
        sorted(
            ({k: v for k, v in e.items() if k not in NOT_REPRODUCIBLE} for e in read_metrics(path / "metrics.jsonl")),
            key=lambda e: (e["step"], "knn_top1" in e),
        )
        for path in (folder, killed, killed.parent / "straight")
    )
    assert resumed == straight and after_kill == straight
    ends = [checkpoint.load(Store(str(p)), newest(p))[0] for p in (folder, killed, killed.parent / "straight")]
    assert identical(ends[0], ends[2]) and identical(ends[1], ends[2])
