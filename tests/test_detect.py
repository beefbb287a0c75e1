"""A detector fine-tuned from a backbone and from scratch, on a drawn COCO set; the measure against answers known beforehand."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from moco_ray import detect as command
from moco_ray.backbone import Backbone, Preprocessing, read_backbone
from moco_ray.cli import main
from moco_ray.detection import coco, detector, judge
from moco_ray.detection.detector import FineTuning
from moco_ray.errors import UserError
from moco_ray.method.encoder import build_backbone
from tests.drawn_boxes import drawn_boxes

REPOSITORY = Path(__file__).parent.parent
STEPS, BATCH, TESTS = 6, 2, 4


@pytest.fixture(scope="module", autouse=True)
def _a_narrow_detector():
    """Around the same ResNet, for the sake of time; the job's test has the whole one."""
    with mock.patch.multiple(detector, PYRAMID_CHANNELS=32, REGIONS_PER_IMAGE=32):
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with train/ and test/, and one.safetensors: a ResNet-10 whose tensors no initialisation draws."""
    folder = tmp_path_factory.mktemp("boxes")
    drawn_boxes(folder / "train", 24, seed=1, sides=(64, 64))
    drawn_boxes(folder / "test", TESTS, seed=2, sides=(64, 96))
    torch.manual_seed(5)
    tensors = build_backbone("resnet10", "imagenet").state_dict()
    for name, value in tensors.items():
        if value.is_floating_point() and value.dim() == 1:
            value.copy_(0.9 + 0.2 * torch.rand(value.shape) if "var" in name or "weight" in name else 0.05 * torch.randn(value.shape))
    one = Backbone("resnet10", "imagenet", tensors, Preprocessing(73, 64, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)), {"run": "/runs/one", "step": 7})
    (folder / "one.safetensors").write_bytes(one.to_bytes())
    return folder


def words(place: Path, output: Path, *more: str) -> list[str]:
    return [
        "detect", str(place / "one.safetensors"), "--images", str(place / "train/images"), "--annotations", str(place / "train/boxes.json"),
        "--test-images", str(place / "test/images"), "--test-annotations", str(place / "test/boxes.json"), "--output", str(output),
        "--steps", str(STEPS), "--batch-size", str(BATCH), "--image-pixels", "64", "--learning-rate", "0.02", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def done(place):
    """The command, once: its output, its files, and both detectors' state before the first step, and the pixels that each saw."""
    began, saw = [], []

    def fine_tune(model, pictures, order, settings, report):
        began.append({name: value.clone() for name, value in model.state_dict().items()})
        saw.append([])
        model.transform.register_forward_pre_hook(lambda _, inputs: saw[-1].append([image.clone() for image in inputs[0]]))
        return real(model, pictures, order, settings, report)

    real = detector.fine_tune
    with mock.patch.object(detector, "fine_tune", fine_tune), contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words(place, place / "out")) == 0
    return {"out": out.getvalue(), "began": began, "saw": saw, "json": json.loads((place / "out/detection.json").read_text())}


def test_the_two_arms_begin_alike_but_for_the_backbone_which_holds_the_checkpoint_s_weights(done, place):
    pretrained, scratch = done["began"]
    tensors = read_backbone(str(place / "one.safetensors")).tensors
    body = {name for name in pretrained if name.startswith("backbone.body.")}
    assert {name.removeprefix("backbone.body.") for name in body} == tensors.keys()
    for name in pretrained:
        if name in body:
            assert torch.equal(pretrained[name], tensors[name.removeprefix("backbone.body.")]), name
        else:
            assert torch.equal(pretrained[name], scratch[name]), name
    assert not any(torch.equal(pretrained[name], scratch[name]) for name in body if name.endswith("conv1.weight"))
    assert len(pretrained) - len(body) > 20


def test_both_arms_see_the_same_pixels_in_the_same_order(done):
    first, second = done["saw"]
    assert len(first) == len(second) == STEPS + min(STEPS, detector.SETTLING_STEPS) + TESTS
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, one, other))
    assert not torch.equal(first[0][0], first[1][0])  # and not one image for ever


def test_the_command_reports_both_arms_as_a_table_and_files_with_losses_that_fall(done, place):
    lines = done["out"].splitlines()
    assert lines[0].split() == ["backbone", "AP", "AP50", "AP75", "loss"]
    assert lines[2].startswith("pre-trained ") and lines[3].startswith("from scratch ")
    assert "BatchNorm trained" in done["out"] and "24 images with" in done["out"] and "tested on 4 others" in done["out"]
    held = done["json"]
    assert held["settings"] == {"steps": STEPS, "batch_size": BATCH, "learning_rate": 0.02, "image_pixels": 64, "seed": 0}
    assert held["backbone"]["step"] == 7 and held["classes"] == {"square": 3, "triangle": 7, "ring": 12}
    for line, (name, arm) in zip(lines[2:4], held["arms"].items(), strict=True):
        assert line.startswith(name) and f" {100 * arm['ap50']:.1f} " in line
        losses = np.array(arm["losses"])
        assert losses.shape == (STEPS,) and np.isfinite(losses).all() and losses[-2:].mean() < 0.8 * losses[:2].mean()
    text = (place / "out/detection.md").read_text()
    assert text.startswith("| backbone | AP |") and held["about"] in text
    with Image.open(place / "out/detections.png") as picture:
        assert picture.width > 800 and np.asarray(picture.convert("RGB")).std() > 20


def sets(place: Path) -> coco.CocoSet:
    return coco.read(str(place / "test/boxes.json"), str(place / "test/images"))


def perfect(picture: coco.Picture) -> judge.Found:
    return judge.Found(picture.boxes, picture.labels, torch.ones(len(picture.labels)))


def test_a_perfect_answer_has_a_precision_of_one_and_none_has_zero(place):
    test = sets(place)
    full = judge.average_precision(test.pictures, [perfect(one) for one in test.pictures], test.classes)
    assert full[:3] == pytest.approx((1.0, 1.0, 1.0)) and full.ap_of_class == pytest.approx({"square": 1.0, "triangle": 1.0, "ring": 1.0})
    nothing = judge.Found(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    none = judge.average_precision(test.pictures, [nothing] * len(test.pictures), test.classes)
    assert none[:3] == (0.0, 0.0, 0.0)


def test_precision_by_hand_of_half_of_the_objects_of_wrong_classes_and_of_boxes_a_little_too_large(tmp_path):
    square = torch.tensor([[10.0, 10.0, 30.0, 30.0]])
    one = coco.Picture(Path("a"), 99, 99, square, torch.tensor([1]), torch.tensor([400.0]), torch.tensor([False]))
    classes = coco.Classes((3, 7), ("square", "triangle"))
    right = judge.Found(square, torch.tensor([1]), torch.tensor([0.9]))
    nothing = judge.Found(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    half = judge.average_precision([one, one], [right, nothing], classes)
    assert half.ap == pytest.approx(51 / 101)  # precision 1 at the 51 recalls 0 to 0.5, 0 beyond
    assert half.ap_of_class == {"square": pytest.approx(51 / 101), "triangle": None}
    wrong = judge.average_precision([one], [right._replace(labels=torch.tensor([2]))], classes)
    assert wrong.ap == 0.0
    wide = judge.Found(torch.tensor([[10.0, 10.0, 30.0, 38.0]]), torch.tensor([1]), torch.tensor([0.9]))  # IoU 20/28 = 0.714
    loose = judge.average_precision([one], [wide], classes)
    assert (loose.ap, loose.ap50, loose.ap75) == pytest.approx((0.5, 1.0, 0.0))  # at 0.50 to 0.70, five of ten
    crowd = coco.Picture(Path("a"), 99, 99, square, torch.tensor([1]), torch.tensor([400.0]), torch.tensor([True]))
    assert judge.average_precision([one, crowd], [right, right], classes).ap == pytest.approx(1.0)  # what lies in a crowd counts neither way
    with pytest.raises(UserError, match="no box: there is nothing to measure"):
        judge.average_precision([crowd], [right], classes)


def test_labels_are_the_categories_in_ascending_order_and_boxes_are_clipped_or_counted(place, tmp_path):
    content = json.loads((place / "test/boxes.json").read_text())
    first, count = content["annotations"][0], len(content["annotations"])
    others = [[5, 5, 0, 10], [5, 5, 10, -3], [500, 5, 10, 10], [-20, 5, 20, 20], [5, 5, float("nan"), 3], [-4, -4, 20, 20]]
    content["annotations"] += [{"id": 900 + n, "image_id": 100, "category_id": 12, "bbox": box} for n, box in enumerate(others)]
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    read = coco.read(str(tmp_path / "boxes.json"), str(place / "test/images"))
    assert read.classes == coco.Classes((3, 7, 12), ("square", "triangle", "ring"))
    assert read.degenerate_boxes == 5 and read.boxes == count + 1
    picture = read.pictures[0]
    x, y, w, h = first["bbox"]
    assert picture.boxes[0].tolist() == [x, y, x + w, y + h] and picture.labels[0] == [3, 7, 12].index(first["category_id"]) + 1
    assert picture.boxes[-1].tolist() == [0, 0, 16, 16] and picture.areas[-1] == 400 and picture.labels[-1] == 3


def test_a_flipped_image_carries_its_boxes_with_it(place):
    picture = next(one for one in sets(place).pictures if len(one.boxes))
    (pixels, target), (mirrored, turned) = (detector._example(picture, flipped) for flipped in (False, True))
    for before, after in zip(target["boxes"].int().tolist(), turned["boxes"].int().tolist(), strict=True):
        (x0, y0, x1, y1), (a0, b0, a1, b1) = before, after
        assert torch.equal(pixels[:, y0:y1, x0:x1].flip(-1), mirrored[:, b0:b1, a0:a1]) and x0 < x1


def test_an_epoch_sees_every_image_once_and_the_order_is_the_seed_s():
    settings = FineTuning(steps=6, batch_size=4, learning_rate=0.1, image_pixels=64, seed=3)
    order = detector.batches(12, settings)
    rows = [sample.row for batch in order for sample in batch]
    assert sorted(rows[:12]) == sorted(rows[12:]) == list(range(12)) and rows[:12] != rows[12:]
    assert order == detector.batches(12, settings) != detector.batches(12, FineTuning(6, 4, 0.1, 64, seed=4))
    assert {sample.flipped for batch in order for sample in batch} == {True, False}


def test_the_learning_rate_warms_up_and_drops_where_voc_s_24k_schedule_does():
    settings = FineTuning(steps=24_000, batch_size=16, learning_rate=0.02, image_pixels=800, seed=0)
    rates = [settings.rate_at(step) for step in (0, 99, 100, 17_999, 18_000, 21_999, 22_000)]
    assert rates == pytest.approx([0.02 / 101, 0.02 * 100 / 101, 0.02, 0.02, 0.002, 0.002, 0.0002])
    assert FineTuning(1, 1, 0.5, 64, 0).rate_at(0) == 0.5


def test_settled_batchnorm_has_the_mean_and_variance_of_the_batches_by_the_weights_as_they_are(place):
    backbone = read_backbone(str(place / "one.safetensors"))
    settings = FineTuning(2, 2, 0.1, 64, 0)
    model = detector.build_detector(backbone.module(), backbone, 3, settings)
    images = [one.pixels().float() / 255 for one in sets(place).pictures[:4]]
    detector.settle_batchnorm(model, iter([images[:2], images[2:]]))
    with torch.no_grad():
        maps = [model.backbone.body.conv1(model.transform(half)[0].tensors) for half in (images[:2], images[2:])]
    norm = model.backbone.body.bn1
    torch.testing.assert_close(norm.running_mean, sum(one.mean((0, 2, 3)) for one in maps) / 2, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norm.running_var, sum(one.var((0, 2, 3)) for one in maps) / 2, atol=1e-5, rtol=1e-4)
    assert norm.momentum == 0.1


def refused(capsys, *given: str) -> str:
    capsys.readouterr()
    assert main(list(given)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("moco-ray: error: "), error
    return error


def changed(place: Path, target: Path, change) -> Path:
    """The training annotations after `change(content)`."""
    content = json.loads((place / "train/boxes.json").read_text())
    change(content)
    target.write_text(json.dumps(content))
    return target


BAD = [
    (lambda c: c["annotations"][2].pop("bbox"), "annotation 2 of", "has no bbox of four numbers"),
    (lambda c: c["annotations"][2].update(bbox=[1, 2, 3]), "annotation 2 of", "has no bbox of four numbers"),
    (lambda c: c["annotations"][0].update(image_id=5), "belongs to image 5, which is not in the list of images", ""),
    (lambda c: c["annotations"][0].update(category_id=4), "has category 4, which is none of", "3, 7, 12"),
    (lambda c: c["images"][3].update(file_name="away.png"), "away.png, image 103 of", "does not exist"),
    (lambda c: c["images"][3].update(id=100), "one id to several images", ""),
    (lambda c: c["images"][3].pop("width"), "has no width", ""),
    (lambda c: c["images"][3].update(width="64"), "give its size in whole pixels", ""),
    (lambda c: c.pop("categories"), "has no list of categories", ""),
    (lambda c: c.update(categories=[]), "has no categories", ""),
    (lambda c: c.update(annotations=[]), "holds no box to learn from", ""),
    (lambda c: c.update(annotations=[{**one, "iscrowd": 1} for one in c["annotations"]]), "holds no box to learn from", ""),
]


@pytest.mark.parametrize("change,told,more", BAD, ids=[told for _, told, _ in BAD])
def test_bad_annotations_are_told_in_one_line_with_the_entry(place, tmp_path, capsys, change, told, more):
    bad = changed(place, tmp_path / "bad.json", change)
    with mock.patch.object(detector, "build_detector", side_effect=AssertionError("training would start")):
        error = refused(capsys, *words(place, tmp_path / "out", "--annotations", str(bad)))
    assert told in error and more in error and not (tmp_path / "out").exists()


def test_images_that_are_broken_or_not_those_that_were_annotated_are_told_when_they_are_read(place, tmp_path):
    wrong = changed(place, tmp_path / "bad.json", lambda content: content["images"][0].update(width=99, height=98))
    first, second = coco.read(str(wrong), str(place / "train/images")).pictures[:2]
    with pytest.raises(UserError, match="0.png has 64x64 pixels and its annotations are for 99x98"):
        first.pixels()
    assert second.pixels().shape == (3, 64, 64)
    (tmp_path / "broken.png").write_bytes((place / "train/images/1.png").read_bytes()[:100])
    with pytest.raises(UserError, match="broken.png cannot be read as an image"):
        coco.Picture(**{**vars(second), "path": tmp_path / "broken.png"}).pixels()


def test_other_mistakes_are_told_in_one_line_with_the_cure(place, tmp_path, capsys):
    out = tmp_path / "out"
    (tmp_path / "cut.json").write_text('{"images": [')
    assert "cut.json is no JSON" in refused(capsys, *words(place, out, "--annotations", str(tmp_path / "cut.json")))
    (tmp_path / "list.json").write_text("[]")
    assert "has no list of images" in refused(capsys, *words(place, out, "--annotations", str(tmp_path / "list.json")))
    assert "cannot be read" in refused(capsys, *words(place, out, "--annotations", "away.json"))
    assert "is no folder on this machine" in refused(capsys, *words(place, out, "--images", str(tmp_path / "away")))
    empty = changed(place, tmp_path / "empty.json", lambda content: content.update(annotations=[]))
    test = ("--test-annotations", str(empty), "--test-images", str(place / "train/images"))
    assert "24 test images have no box" in refused(capsys, *words(place, out, *test))
    for option, value in (("--steps", "0"), ("--batch-size", "0"), ("--image-pixels", "32"), ("--learning-rate", "0"), ("--seed", "-1")):
        assert f"{option} " in refused(capsys, *words(place, out, option, value))
    basic = words(place, out)[:6]
    assert "give --output FOLDER" in refused(capsys, *basic)
    assert "--test-images x without --test-annotations" in refused(capsys, *basic, "--output", str(out), "--test-images", "x")
    with mock.patch.dict(sys.modules, {"pycocotools": None, "pycocotools.coco": None}):
        assert "pip install 'moco_ray[detection]'" in refused(capsys, *words(place, out))
    assert not out.exists()


def test_a_loss_that_is_not_finite_ends_the_training_with_the_step_and_the_cure(place):
    backbone = read_backbone(str(place / "one.safetensors"))
    settings = FineTuning(2, 1, 0.1, 64, 0)
    model = detector.build_detector(backbone.module(), backbone, 3, settings)
    torch.nn.init.constant_(model.roi_heads.box_predictor.cls_score.bias, float("nan"))
    with pytest.raises(UserError, match="not finite at step 1; give a lower --learning-rate"):
        detector.fine_tune(model, sets(place).trainable().pictures, detector.batches(4, settings), settings, lambda step, loss: None)


def test_images_without_a_box_are_no_training_images_but_test_images_and_a_fifth_is_held_out(place, tmp_path):
    content = json.loads((place / "train/boxes.json").read_text())
    kept = [one for one in content["annotations"] if one["image_id"] < 105]  # five of the 24 images
    path = changed(place, tmp_path / "less.json", lambda content: content.update(annotations=kept))
    places = command.Places(str(place / "train/images"), str(path))
    train, test = command._sets(places, seed=0)
    assert len(test.pictures) == 5 and all(len(one.boxes) for one in train.pictures)
    with_boxes = {one.path for one in train.pictures} | {one.path for one in test.pictures if len(one.boxes)}
    assert {one.name for one in with_boxes} == {f"{n}.png" for n in range(5)} and len(train.pictures) < 5
    same, _ = command._sets(places, seed=0)
    other, _ = command._sets(places, seed=1)
    names = [[one.path.name for one in some.pictures] for some in (train, same, other)]
    assert names[0] == names[1] != names[2]


def test_the_job_runs_the_command_as_its_header_says(place, tmp_path):
    environment = {
        **os.environ, "BACKBONE": str(place / "one.safetensors"), "IMAGES": str(place / "train/images"),
        "ANNOTATIONS": str(place / "train/boxes.json"), "OUTPUT": str(tmp_path / "with space"), "PYTHONPATH": str(REPOSITORY),
        "MOCO_RAY": f"{sys.executable} -m moco_ray",
    }  # fmt: skip
    job = ["sh", str(REPOSITORY / "jobs/detection.sh"), "--steps", "1", "--batch-size", "1", "--image-pixels", "64"]
    ran = subprocess.run(job, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "pre-trained" in ran.stdout and "held out by the seed" in ran.stdout
    assert {one.name for one in (tmp_path / "with space").iterdir()} == {"detection.json", "detection.md", "detections.png"}
    lacking = subprocess.run(job, env={**environment, "IMAGES": ""}, capture_output=True, text=True)
    assert lacking.returncode == 2 and "IMAGES: is not set" in lacking.stderr
