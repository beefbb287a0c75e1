"""What a user gets wrong, and what they read then: one line with the cure, exit code 2, before Ray starts."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from PIL import Image

from moco_ray.checkpoint import pack, save
from moco_ray.cli import main
from moco_ray.data import order
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.lease import Lease
from moco_ray.plan import Plan
from moco_ray.progress import Progress
from moco_ray.recipe import Recipe

JOBS = sorted((Path(__file__).parent.parent / "jobs").glob("*.toml"))
RECIPE = """
[encoder]
backbone = "resnet10"
stem = "small_stride2"
[contrast]
queue_keys = 16
[batch]
global_batch_size = 8
bn_group_size = 2
[schedule]
steps = 3
[augment]
image_pixels = 16
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a recipe and 12 images, as the working folder; Ray may not start."""
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(RECIPE)
    Path("images/a").mkdir(parents=True)
    Path("flat").mkdir()
    for i in range(12):
        Image.new("RGB", (20, 20), (i, 2 * i, 3 * i)).save(f"images/a/{i}.png")
    Image.new("RGB", (20, 20)).save("flat/0.png")
    with mock.patch("moco_ray.launch.ray_session", side_effect=AssertionError("Ray would start")):
        yield tmp_path


@contextlib.contextmanager
def carried():
    """A cluster that has room, and workers that do nothing: what they would have been given."""
    with (
        mock.patch("moco_ray.launch.ray_session", side_effect=lambda *_: contextlib.nullcontext()),
        mock.patch("moco_ray.launch._carry") as carry,
    ):
        yield carry


def refused(capsys, *words: str) -> str:
    """Run a command that must fail as a user's mistake; its one line."""
    assert main(list(words)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("moco-ray: error: "), lines
    return lines[0]


SETS = ("evaluation.bank_uri=images", "evaluation.query_uri=images")
PRETRAIN = ("pretrain", "small.toml", "--data", "images")


@pytest.mark.parametrize(
    "words,told",
    [
        ((*PRETRAIN, "optimizer.learningrate=1"), "unknown key 'optimizer.learningrate'; the nearest known one is 'optimizer.learning_rate'"),
        ((*PRETRAIN, "encoder.backbone=resnet51"), "the nearest is 'resnet50'"),
        ((*PRETRAIN, "contrast.temperature=0"), "contrast.temperature = 0: input should be greater than 0"),
        ((*PRETRAIN, "schedule.epochs=2"), "give exactly one of the two"),
        ((*PRETRAIN, "batch.bn_group_size=8"), "one BatchNorm group over the whole batch leaks"),
        ((*PRETRAIN, "batch.bn_group_size=3"), "choose a group size that divides it"),
        ((*PRETRAIN, "no_equals_sign"), "section.key=value"),
        (("pretrain", "missing.toml", "--data", "images"), "no recipe at missing.toml; the presets lie in jobs/"),
        (("pretrain", "small.toml"), "no data set: give --data FOLDER"),
        (("pretrain", "small.toml", "--data", "nowhere"), "nowhere does not exist"),
        (("pretrain", "small.toml", "--data", "gs://bucket/x"), "install gcsfs"),
        ((*PRETRAIN, "batch.global_batch_size=16"), "12 rows, fewer than batch.global_batch_size 16"),
        ((*PRETRAIN, "--workers", "5"), "more workers than the 4 BatchNorm groups"),
        ((*PRETRAIN, "--workers", "0"), "at least one worker"),
        ((*PRETRAIN, "--workers", "3:2"), "the fewest come first"),
        ((*PRETRAIN, "--workers", "0:2"), "at least one worker"),
        ((*PRETRAIN, "--workers", "1:5"), "more workers than the 4 BatchNorm groups"),
        ((*PRETRAIN, "--workers", "few"), "give a number, as 4, or the fewest and the most, as 2:16"),
        ((*PRETRAIN, "--storage", "nowhere://runs"), "nowhere"),
        ((*PRETRAIN, "--storage", "s3://key:secret@bucket/runs"), "credentials in a URI"),
        ((*PRETRAIN, "--name", "a/b"), "must be a folder name"),
        ((*PRETRAIN, "--name", "images", "--storage", "."), "is not empty and no run folder"),
        ((*PRETRAIN, "evaluation.bank_uri=images"), "give both or neither"),
        ((*PRETRAIN, "evaluation.bank_uri=images", "evaluation.query_uri=images"), "evaluation.neighbours 200 is more than the 12 rows"),
        ((*PRETRAIN, *SETS, "evaluation.neighbours=3", "evaluation.resize_pixels=8"), "resize_pixels 8 is smaller than the crop"),
        ((*PRETRAIN, "evaluation.bank_uri=flat", "evaluation.query_uri=flat"), "lies in no class folder"),
        ((*PRETRAIN, "evaluation.bank_uri=flat", "evaluation.query_uri=images"), "evaluation.bank_uri: "),
        ((*PRETRAIN, "evaluation.bank_uri=images", "evaluation.query_uri=flat", "evaluation.neighbours=1"), "evaluation.query_uri: "),
        ((*PRETRAIN, "--profile", "0"), "give the number of steps to trace"),
        (("resume", "images"), "is no run folder"),
        (("evaluate", "images"), "is no run folder"),
        (("show-plan", "small.toml", "--rows", "7"), "7 rows, fewer than"),
        (("show-plan", "small.toml", "--rows", "12", "--workers", "1:5"), "more workers than the 4 BatchNorm groups"),
        (("show-plan", "small.toml", "--rows", "12", "--workers", "0"), "at least one worker"),
        (("show-plan", "small.toml", "--data", "images", "--rows", "7"), "contradicts the data set's 12 rows"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_cure_and_exit_code_2_before_ray_starts(place, capsys, words, told):
    assert told in refused(capsys, *words)


def test_no_images_and_an_empty_folder_are_told(place, capsys):
    Path("empty").mkdir()
    assert "empty" in refused(capsys, "pretrain", "small.toml", "--data", "empty")


JOB = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": "first"}})}


@pytest.mark.parametrize("command", [["show-plan", "small.toml", "--rows", "12"], ["show-plan", "RECIPE", "--data", "images"]])
def test_a_working_folder_that_was_removed_below_a_job_is_told_with_its_cure(tmp_path, command):
    (tmp_path / "whole.toml").write_text(RECIPE)
    (tmp_path / "job").mkdir()
    words = [sys.executable, "-m", "moco_ray", *(str(tmp_path / "whole.toml") if word == "RECIPE" else word for word in command)]
    environment = {**os.environ, "PYTHONPATH": str(JOBS[0].parent.parent)}
    within = f"cd {tmp_path}/job && rmdir {tmp_path}/job && exec \"$@\""
    for variables, cure in ((JOB, "--temp-dir of its own"), ({"RAY_JOB_CONFIG_JSON_ENV_VAR": ""}, "change into one that is there")):
        (tmp_path / "job").mkdir(exist_ok=True)
        ran = subprocess.run(["sh", "-c", within, "sh", *words], env=environment | variables, capture_output=True, text=True)
        assert ran.returncode == 2 and cure in ran.stderr and len(ran.stderr.splitlines()) == 1, ran


def test_a_working_folder_that_was_emptied_below_a_job_is_told_and_any_other_missing_recipe_is_not_blamed_on_it(place, capsys, monkeypatch):
    monkeypatch.setenv(*next(iter(JOB.items())))
    assert "the presets lie in jobs/" in refused(capsys, "pretrain", "other.toml")
    Path("none").mkdir()
    monkeypatch.chdir("none")
    assert "no recipe at small.toml; the job's folder is empty, as happens where two Ray nodes" in refused(capsys, "pretrain", "small.toml")
    assert "the presets lie in jobs/" in refused(capsys, "pretrain", str(place / "other.toml"))
    monkeypatch.delenv(*JOB)
    assert "the presets lie in jobs/" in refused(capsys, "pretrain", "small.toml")


def test_a_recipe_that_is_not_toml_names_the_line(place, capsys):
    Path("bad.toml").write_text("[encoder\n")
    assert "not valid TOML" in refused(capsys, "pretrain", "bad.toml", "--data", "images")


def started(place) -> Path:
    """A run folder as `pretrain` leaves it when it is interrupted before its first checkpoint."""
    with carried():
        assert main([*PRETRAIN]) == 0
    return place / "runs" / "small"


def test_the_same_command_again_goes_on_with_its_run_and_another_recipe_is_refused(place, capsys):
    run = started(place)
    assert {"recipe.toml", "plan.json", "run.json", "manifest.parquet"} <= {p.name for p in run.iterdir()}
    began = (run / "run.json").read_text()
    capsys.readouterr()
    started(place)
    assert f"{run} holds this run (it has no checkpoint yet): going on with it" in capsys.readouterr().err
    assert (run / "run.json").read_text() == began
    other = refused(capsys, *PRETRAIN, "contrast.temperature=0.5")
    assert "another recipe (contrast.temperature: 0.2, not 0.5)" in other
    Path("images/a/11.png").unlink()
    assert "is not what the run" in refused(capsys, *PRETRAIN)


def test_a_run_that_the_cluster_has_no_room_for_leaves_no_run_behind_and_changes_none(place, capsys):
    with mock.patch("moco_ray.launch.ray_session", side_effect=UserError("the Ray cluster has 2 CPUs")):
        assert main([*PRETRAIN, "--workers", "4"]) == 2 and "has 2 CPUs" in capsys.readouterr().err
        assert "no run lies in" in refused(capsys, "runs", "runs")
        run = started(place)  # with room it begins
        capsys.readouterr()
        before = {path.name: path.read_bytes() for path in run.iterdir() if path.name != "lease.json"}
        for words in (PRETRAIN, ("resume", str(run))):
            assert main([*words, "--workers", "4", "run.log_every_steps=7"]) == 2 and "has 2 CPUs" in capsys.readouterr().err
        assert before == {path.name: path.read_bytes() for path in run.iterdir() if path.name != "lease.json"}


def test_a_run_that_another_driver_carries_is_refused_by_both_commands(place, capsys):
    run = started(place)
    with Lease.acquire(Store(str(run)), print, beat_seconds=0.2):
        for words in (PRETRAIN, ("resume", str(run))):
            capsys.readouterr()
            assert main(list(words)) == 2
            waited, error = capsys.readouterr().err.strip().splitlines()  # a moment, to see whether the other still lives
            assert "waiting up to 30 s" in waited and "is being carried by process" in error


def test_a_folder_with_something_else_in_it_is_refused(place, capsys):
    (place / "runs" / "small").mkdir(parents=True)
    (place / "runs" / "small" / "thesis.doc").write_text("")
    assert "is not empty and no run folder (it holds thesis.doc)" in refused(capsys, *PRETRAIN)


def checkpointed(run: Path, step: int, recipe_fingerprint: str) -> None:
    """A whole checkpoint of an empty state."""
    about = {
        "recipe_fingerprint": recipe_fingerprint,
        "data_fingerprint": json.loads((run / "run.json").read_text())["data_fingerprint"],
        "order_version": order.VERSION,
    }
    save(Store(str(run)), step, 1, pack({}, about), about, keep=1)


def test_a_finished_run_is_left_alone_by_both_commands(place, capsys):
    run = started(place)
    checkpointed(run, 3, Recipe.read(run / "recipe.toml").fingerprint())
    capsys.readouterr()
    with carried() as carry:
        assert main([*PRETRAIN]) == 0
    assert not carry.called and "it is finished: nothing to do" in capsys.readouterr().err
    assert "is finished: all 3 steps are done" in refused(capsys, "resume", str(run))


def test_resume_refuses_another_recipe_changed_data_and_another_s_checkpoint(place, capsys):
    run = started(place)
    capsys.readouterr()
    assert "contrast.temperature: 0.5, not 0.2" in refused(capsys, "resume", str(run), "contrast.temperature=0.5")
    checkpointed(run, 2, "other")
    assert "was made with recipe other" in refused(capsys, "resume", str(run))
    Path("images/a/11.png").unlink()
    assert "began with (11 rows, 12 then" in refused(capsys, "resume", str(run))


def test_resume_takes_run_settings_and_the_data_at_another_place(place):
    run = started(place)
    Path("images").rename("moved")
    with carried() as carry:
        assert main(["resume", str(run), "--data", "moved", "run.log_every_steps=2", "--workers", "2"]) == 0
    surveyed, folder, (_, workers), *_ = carry.call_args.args
    recipe = surveyed.plan.recipe
    assert (recipe.run.log_every_steps, recipe.data.uri, workers.most) == (2, str(place / "moved"), 2)
    assert Recipe.read(run / "recipe.toml") == recipe and folder.place == str(run)


def test_debug_shows_the_traceback_and_unknown_words_are_refused(place, capsys):
    with pytest.raises(ValueError, match="nowhere"):
        main(["pretrain", "small.toml", "--data", "nowhere", "--debug"])
    for words in (["resume", "x", "--nonsense"], ["demo-data", "x", "y"], ["fly"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_every_preset_is_valid_and_show_plan_explains_it(job, capsys):
    rows = [] if job.stem == "demo" else ["--rows", "1281167"]
    if job.stem == "demo":
        rows = ["data.uri=", "--rows", "50000"]
    assert main(["show-plan", str(job), *rows]) == 0
    out = capsys.readouterr().out
    for word in ("steps", "chance loss", "learning rate", "queue", "checkpoint", "efficiency"):
        assert word in out


def test_the_imagenet_presets_are_the_published_numbers():
    v1, v2, long, wide = (
        Recipe.read(JOBS[0].parent / f"moco_{name}.toml")
        for name in ("v1_imagenet", "v2_imagenet", "v2_imagenet_800ep", "v2_imagenet_64gpu")
    )
    assert (v1.encoder.head, v1.contrast.temperature, v1.augment.jitter, v1.augment.grayscale_first) == (
        "linear", 0.07, (0.4, 0.4, 0.4, 0.4), True,
    )  # fmt: skip
    assert (v2.encoder.head, v2.contrast.temperature, v2.augment.jitter[3], v2.augment.blur_probability) == (
        "mlp",
        0.2,
        0.1,
        0.5,
    )
    for recipe in (v1, v2, long):
        assert (recipe.batch.global_batch_size, recipe.batch.groups, recipe.optimizer.learning_rate) == (256, 8, 0.03)
        assert recipe.contrast.queue_keys == 65536 and recipe.contrast.key_momentum == 0.999
        plan = Plan(recipe, 1_281_167)
        assert plan.steps_per_epoch == 5004 and plan.chance_loss == pytest.approx(11.0904, abs=1e-4)
    assert long.schedule.epochs == 800
    assert (wide.batch.global_batch_size, wide.batch.groups) == (2048, 64)


def test_show_plan_warns_of_what_will_go_wrong(place, capsys):
    words = ("contrast.queue_keys=64", "contrast.key_momentum=0.9", "contrast.symmetric=true")
    assert main(["show-plan", "small.toml", "--data", "images", *words]) == 0
    out = capsys.readouterr().out
    for told in (
        "is not smaller than the data set's 12 rows",
        "go stale",
        "4 BatchNorm groups",
        "halves the age",
        "4 rows are left out",
    ):
        assert told in out
    assert (
        main(["show-plan", "small.toml", "--rows", "12", "batch.bn_group_size=8", "batch.allow_batchnorm_leak=true"])
        == 0
    )
    assert "batch norm leaks" in capsys.readouterr().out


def test_show_plan_of_a_range_of_workers_shows_both_ends(place, capsys):
    words = ["show-plan", "small.toml", "--data", "images", "--at-step", "0"]
    shown = {}
    for workers in ("2:3", "2", "3"):
        assert main([*words, "--workers", workers]) == 0
        shown[workers] = capsys.readouterr().out.splitlines()
    assert "workers        2:3 of at most 4; efficiency 100% with 2, 67% with 3" in shown["2:3"]
    for end in ("2", "3"):
        for line in shown[end]:
            if line.startswith(("segments", "reading", "memory", "at step")):
                assert f"{line[:15]}{end} workers: {line[15:]}" in shown["2:3"]
    assert shown["2"][0] == shown["2:3"][0] and len(shown["2:3"]) == len(shown["3"]) + 3 + 2


def test_efficiency_of_workers_that_do_not_divide_the_groups():
    plan = Plan(Recipe.parse({"schedule": {"steps": 5}}), 1000)
    assert [round(plan.efficiency(w), 3) for w in (1, 2, 3, 5, 8)] == [1.0, 1.0, 0.889, 0.8, 1.0]


class Terminal(io.StringIO):
    def isatty(self):
        return True


ENTRY = {
    "step": 20, "epoch": 0.5, "loss": 6.5, "chance_loss": 7.6, "images_per_second": 512.4, "input_wait_share": 0.03,
    "queue_fill": 0.25,
}  # fmt: skip


def test_progress_shows_epoch_step_loss_rate_wait_and_time_left():
    for out in (Terminal(), io.StringIO()):
        progress = Progress(Plan(Recipe.parse({"schedule": {"steps": 100}}), 40 * 256), 0, out)
        progress.show(ENTRY)
        progress.show({"step": 20, "epoch": 0.5, "knn_top1": 0.8123})
        progress.show({**ENTRY, "step": 100, "epoch": 2.5, "queue_fill": 1.0})
        progress.close()
        text = out.getvalue()
        for told in ("epoch 0.50/2.5", "step 20/100", "loss 6.500 (chance 7.60)", "512 img/s",
                     "input wait 3%", "0:40 left", "queue 25% full", "kNN 81.2%"):  # fmt: skip
            assert told in text
