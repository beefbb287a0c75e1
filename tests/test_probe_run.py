"""`moco-ray evaluate --protocol ...` as its user runs it: two Ray Train workers, a local Ray, the files of the result; and mistakes.

What Ray carries is compared with the same rows in one process. The backbone is untrained: nothing here is about accuracy.
"""

import contextlib
import itertools
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moco_ray.backbone import Backbone, Preprocessing
from moco_ray.cli import main
from moco_ray.data.augment import normalise
from moco_ray.data.labels import read_labels
from moco_ray.data.prototypes import PROTOTYPES, drawn_prototypes
from moco_ray.data.segment import Source
from moco_ray.data.subset import share_of_each_class
from moco_ray.data.survey import build_manifest
from moco_ray.evaluate import probe, protocols
from moco_ray.evaluate.features import LabelledSet
from moco_ray.evaluate.protocols import Choices
from moco_ray.evaluate.scores import Tally
from moco_ray.method.encoder import build_backbone
from moco_ray.probe_worker import Kept, ProbeJob, _student
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from tests.shell import Shell
from tests.test_learning import labelled, rows_without_ray

ROWS, TEST_ROWS, PIXELS = 600, 200, 32
SETS = ("--bank", "drawn/train", "--queries", "drawn/test")


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    drawn_prototypes(folder / "drawn", rows=ROWS, test_rows=TEST_ROWS, pixels=PIXELS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tensors = build_backbone("resnet10", "small_stride2").state_dict()
    preprocessing = Preprocessing(PIXELS, PIXELS, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    (folder / "net.safetensors").write_bytes(Backbone("resnet10", "small_stride2", tensors, preprocessing, {"step": 7}).to_bytes())
    shell = Shell(folder, {})
    yield shell
    shell.close()


def undisturbed(folder: Path, kind: str, choices: Choices, percent: int = 100, epochs: int = 3) -> list[dict]:
    """The history that one process gives of the first epochs, without Ray."""
    base = Recipe.of_overrides(
        ["encoder.backbone=resnet10", "encoder.stem=small_stride2", "schedule.steps=1", f"augment.image_pixels={PIXELS}",
         f"evaluation.resize_pixels={PIXELS}", f"evaluation.bank_uri={folder}/drawn/train", f"evaluation.query_uri={folder}/drawn/test"]
    )  # fmt: skip
    protocol = protocols.linear(base, choices) if kind == "linear" else protocols.finetune(base, choices, percent)
    manifest, recipe = build_manifest(str(folder / "drawn" / "train"), "image"), protocol.recipe
    labels = read_labels(manifest, "label")
    subset = share_of_each_class(labels, percent, recipe.run.seed) if percent < 100 else None
    everything = LabelledSet(manifest, np.arange(ROWS))
    content = (folder / "net.safetensors").read_bytes()
    job = ProbeJob(protocol, content, everything, everything, labels, PROTOTYPES, subset, Kept("", {}), None)
    crops, wanted = labelled(folder / "drawn" / "test", TEST_ROWS)
    student = _student(job, torch.device("cpu"))

    def judge(network):
        tally = Tally(PROTOTYPES, torch.device("cpu"))
        tally.add(network(normalise(crops, recipe.augment)), wanted)
        return tally.scores(Ranks())

    torch.set_num_threads(1)  # two on a busy machine wait for each other
    rows = itertools.islice(rows_without_ray(Source(manifest, recipe, job.plan, subset)), epochs * job.plan.steps_per_epoch)
    probe.train(student, rows, torch.from_numpy(labels), job.plan, Ranks(), judge, lambda held: None)
    return student.history


def refuse_other(history: list[dict], expected: list[dict]) -> None:
    """float32, so only near; a row more or less right of 200 or a few thousand."""
    for found, other in zip(history, expected, strict=True):
        for key in ("loss", "learning_rate", "classifier_learning_rate"):
            assert found[key] == pytest.approx(other[key], rel=1e-3), (key, found, other)
        for key in ("test_top1", "test_top5", "training_top1"):
            assert found[key] == pytest.approx(other[key], abs=0.0101), (key, found, other)


def test_two_workers_train_the_linear_classifier_as_one_process_does_and_the_result_says_how(shell):
    code, out, error = shell.run(
        "evaluate", "net.safetensors", "--protocol", "linear", *SETS, "--output", "judged", "--workers", "2", "--epochs", "3",
        "--batch-size", "64", "--learning-rate", "0.05",
    )  # fmt: skip
    assert code == 0, error
    assert [line.split("  ")[0] for line in error.splitlines() if line.startswith("epoch")] == [f"epoch {n}/3" for n in (1, 2, 3)]
    held, folder = json.loads((shell.folder / "judged" / "linear.json").read_text()), shell.folder
    refuse_other(held["history"], undisturbed(folder, "linear", Choices(3, 0.05, 64)))
    assert held["last"]["epoch"] == 3 and held["last"]["top1"] == held["history"][-1]["test_top1"]
    tops = [entry["test_top1"] for entry in held["history"]]
    assert held["best"]["top1"] == max(tops) and held["best"]["epoch"] == 1 + tops.index(max(tops)) and "last" in out and "best" in out
    counts = np.array(held["last"]["confusion"])
    assert counts.sum() == TEST_ROWS and counts.trace() == round(TEST_ROWS * held["last"]["top1"]) and len(held["last"]["per_class"]) == PROTOTYPES
    protocol = held["protocol"]
    assert (protocol["optimizer"]["classifier_learning_rate"], protocol["milestone_epochs"], protocol["seed"]) == (0.05, [2], 0)
    assert protocol["recipe"]["augment"]["crop_scale"] == [0.08, 1.0] and len(protocol["recipe_fingerprint"]) == 16
    assert held["sets"]["training"] == {
        "uri": str(folder / "drawn" / "train"), "rows": ROWS,
        "fingerprint": build_manifest(str(folder / "drawn" / "train"), "image").fingerprint,
    }  # fmt: skip
    assert held["rows_dropped_each_epoch"] == 600 % 64 and held["backbone"]["step"] == 7 and len(held["backbone"]["file_sha256"]) == 64
    assert held["markdown"] in (folder / "judged" / "linear.md").read_text() and protocol["recipe_fingerprint"] in held["markdown"]
    assert Image.open(folder / "judged" / "confusion-linear.png").size[0] > 400
    assert not list((folder / "judged").rglob("*.pt"))  # the state between epochs is gone


@pytest.mark.slow
def test_finetuning_goes_on_from_its_last_epoch_when_a_worker_is_killed(shell):
    words = ("evaluate", "net.safetensors", "--protocol", "finetune", "--labels", "10", *SETS, "--output", "tuned")
    process = shell.start(*words, "--workers", "2", "--epochs", "12", "--batch-size", "16", "--learning-rate", "0.0001")
    end = time.monotonic() + 300
    while not list((shell.folder / "tuned").rglob("*.pt")):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)
    killed = kill_a_worker(shell)
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0 and killed, error
    assert "the workers failed" in error and "going on after epoch" in error, error
    held = json.loads((shell.folder / "tuned" / "finetune-10.json").read_text())
    assert held["labels_used"] == 60 and held["protocol"]["bn_group_size"] == 8 and held["protocol"]["label_percent"] == 10
    assert [entry["epoch"] for entry in held["history"]] == list(range(1, 13))
    refuse_other(held["history"][:3], undisturbed(shell.folder, "finetune", Choices(12, 0.0001, 16), 10))


def kill_a_worker(shell: Shell) -> bool:
    """One of its Ray Train workers, at once."""
    raylets = {folder.name for folder in shell._daemons()}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = next(line.split()[1] for line in (folder / "status").read_text().splitlines() if line.startswith("PPid"))
            if parent in raylets and b"RayTrainWorker" in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
                return True
    return False


@pytest.mark.slow
def test_a_sweep_is_judged_as_a_table_is_and_says_what_every_rate_reached(shell):
    code, out, error = shell.run("evaluate", "net.safetensors", "--protocol", "sweep", *SETS, "--output", "swept", "--epochs", "20", "--batch-size", "60")
    assert code == 0, error
    held = json.loads((shell.folder / "swept" / "sweep.json").read_text())
    tried = held["protocol"]["held_out_top1"]
    assert list(map(float, tried)) == held["protocol"]["rates"] and held["protocol"]["chosen_rate"] == float(max(tried, key=tried.get))
    assert sum(map(sum, held["last"]["confusion"])) == TEST_ROWS and len(held["history"]) == 20 and len(held["protocol"]["recipe_fingerprint"]) == 16


@pytest.fixture(scope="module")
def place(shell):
    """Sets that cannot be used, as trees of class folders, and one that can."""
    image = Image.new("RGB", (40, 40), (90, 120, 30))
    for name, classes, count in (("trained", ("a", "b"), 20), ("tested", ("a", "b"), 4), ("other", ("a", "c"), 4)):
        for label in classes:
            (shell.folder / name / label).mkdir(parents=True)
            for number in range(count):
                image.putpixel((number, 0), (number, 0, 0))
                image.save(shell.folder / name / label / f"{number}.png")
    (shell.folder / "flat").mkdir()
    image.save(shell.folder / "flat" / "0.png")
    return shell.folder


LINEAR = ("--protocol", "linear", "--output", "out")


@pytest.mark.parametrize(
    "words,told",
    [
        ((*LINEAR, "--bank", "trained", "--queries", "trained"), "would be trained on and tested on"),
        ((*LINEAR, "--bank", "trained", "--queries", "other"), "different class folders"),
        ((*LINEAR, "--bank", "trained", "--queries", "flat"), "lies in no class folder"),
        ((*LINEAR, "--bank", "flat", "--queries", "tested"), "--bank: "),
        ((*LINEAR,), "give --bank FOLDER to train on and --queries FOLDER to test on"),
        ((*LINEAR, "--bank", "trained", "--queries", "tested"), "--batch-size 256 is larger than the 40 labelled training rows"),
        ((*LINEAR, "--bank", "trained", "--queries", "tested", "--batch-size", "32", "--workers", "3"), "use at most 2 workers"),
        ((*LINEAR, "--bank", "trained", "--queries", "tested", "--batch-size", "7"), "no divisor"),
        ((*LINEAR, "--bank", "trained", "--queries", "tested", "--epochs", "0"), "--epochs 0 must be at least 1"),
        ((*LINEAR, "--bank", "trained", "--queries", "tested", "--learning-rate", "nan"), "--learning-rate nan must be above 0"),
        ((*LINEAR, "--bank", "trained", "--queries", "tested", "--image-pixels", "4"), "--image-pixels 4 must be at least 8"),
        ((*LINEAR, "--workers", "0"), "at least one worker"),
        ((*LINEAR, "--labels", "10"), "--labels goes with --protocol finetune, not with linear"),
        (("--workers", "2"), "--workers goes with --protocol linear or finetune, not with table"),
        ((*LINEAR, "--no-linear"), "--no-linear goes with --protocol table"),
        (("--protocol", "linear", "--bank", "trained", "--queries", "tested"), "give --output FOLDER"),
        (("--protocol", "finetune", "--labels", "5", "--output", "out", "--bank", "trained", "--queries", "tested"), "1, 10 or 100"),
        ((*LINEAR, "--seed", "-1"), "--seed -1 must be 0 or more"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_cure_before_ray_starts(place, monkeypatch, capsys, words, told):
    monkeypatch.chdir(place)
    assert main(["evaluate", "net.safetensors", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.strip().splitlines()) == 1, error


def test_one_class_and_a_class_that_no_training_row_has_are_refused(shell, monkeypatch, capsys):
    """Labels of shards are numbers, so nothing but the numbers tells."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.chdir(shell.folder)
    for name, label in (("ones", 1), ("strange", 99)):
        for source in sorted((shell.folder / "drawn" / "test").rglob("*.parquet")):
            table = pq.read_table(source)
            labels = pa.array([label] * len(table), table["label"].type)
            (shell.folder / name).mkdir(exist_ok=True)
            pq.write_table(table.set_column(table.schema.get_field_index("label"), "label", labels), shell.folder / name / source.name)
    for bank, queries, told in (("ones", "drawn/test", "all of one class"), ("drawn/train", "strange", "class 99, which no training row has")):
        assert main(["evaluate", "net.safetensors", *LINEAR, "--bank", bank, "--queries", queries]) == 2
        assert told in capsys.readouterr().err
