"""Each export is loaded by its own library and must give the same features; a file of another layout, imported, must too.

Detectron2 and MMPretrain cannot be installed here: their names are compared with their documented mapping, written out below.
"""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import yaml
from PIL import Image
from safetensors.torch import save as bytes_of_tensors
from torch import nn

import moco_ray
from moco_ray import checkpoint
from moco_ray.backbone import Backbone, Preprocessing, read_backbone
from moco_ray.cli import main
from moco_ray.data import order
from moco_ray.data.augment import normalise
from moco_ray.data.decode import centre_crop
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.evaluate_run import opened
from moco_ray.export import FORMATS, export
from moco_ray.learner import Learner
from moco_ray.method.encoder import build_backbone
from moco_ray.recipe import Recipe
from tests.object_stores import filled, use

PIXELS = 64
TO_THE_BIT = {"atol": 0.0, "rtol": 0.0}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def weights(name: str, stem: str = "imagenet", seed: int = 0) -> dict[str, torch.Tensor]:
    """A backbone's tensors, as after training: no running statistic and no scale is its first value."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, value in build_backbone(name, stem).state_dict().items():
        if value.is_floating_point():
            noise = torch.rand(value.shape, generator=draw)
            wide = value.dim() > 1
            tensors[key] = (noise - 0.5) * 3.4 / value[0].numel() ** 0.5 if wide else 0.5 + noise
        else:
            tensors[key] = torch.tensor(17)
    return tensors


def backbone(name: str = "resnet18", stem: str = "imagenet") -> Backbone:
    preprocessing = Preprocessing(73, PIXELS, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    return Backbone(name, stem, weights(name, stem), preprocessing, {"run": "/runs/one", "step": 7})


def images(rows: int = 32) -> torch.Tensor:
    """N,3,P,P uint8."""
    return torch.randint(0, 256, (rows, 3, PIXELS, PIXELS), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def standardised(pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3)))
    return (pixels.float() / 255 - mean) / std


@torch.no_grad()
def features(one: Backbone, pixels: torch.Tensor) -> torch.Tensor:
    """What the backbone's own module says: N,D."""
    return one.module()(standardised(pixels))


@pytest.fixture
def written(tmp_path):
    """A function: a backbone exported to a format, the path."""

    def write(one: Backbone, to: str):
        source = tmp_path / "source.safetensors"
        source.write_bytes(one.to_bytes())
        target = tmp_path / f"{to}{FORMATS[to].suffix}"
        export(str(source), to, str(target))
        return target

    return write


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvision_takes_all_names_but_its_classifier_and_gives_the_same_features(written, name):
    one = backbone(name)
    model = getattr(torchvision.models, name)()
    told = model.load_state_dict(torch.load(written(one, "torchvision"), weights_only=True), strict=False)
    assert told.missing_keys == ["fc.weight", "fc.bias"] and told.unexpected_keys == []
    model.fc = nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(standardised(images())), features(one, images()), **TO_THE_BIT)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_timm_makes_the_model_from_the_folder_with_its_size_mean_and_std(written, name):
    import timm

    one = backbone(name)
    model = timm.create_model(f"local-dir:{written(one, 'timm')}", pretrained=True).eval()
    assert model.num_features == one.features and model.num_classes == 0
    config = timm.data.resolve_model_data_config(model)
    found = [tuple(config[key]) for key in ("input_size", "mean", "std")]
    assert found == [(3, PIXELS, PIXELS), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)]
    assert config["interpolation"] == "bilinear"
    prepare = timm.data.create_transform(**config)
    assert prepare.transforms[0].size == 73 and tuple(prepare.transforms[1].size) == (PIXELS, PIXELS)
    with torch.no_grad():
        torch.testing.assert_close(model(standardised(images())), features(one, images()), **CLOSE)
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == {
        key: tuple(value.shape) for key, value in one.tensors.items()
    }


@pytest.mark.parametrize("name", ["resnet10", "resnet18", "resnet50"])
def test_transformers_loads_the_folder_with_no_key_missing_and_its_processor_prepares_the_same(written, name):
    import transformers

    one = backbone(name)
    folder = written(one, "transformers")
    model, told = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], told
    with torch.no_grad():
        given = model.eval()(standardised(images())).pooler_output.flatten(1)
    torch.testing.assert_close(given, features(one, images()), **CLOSE)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (100, 140, 3), dtype=np.uint8))
    prepared = transformers.AutoImageProcessor.from_pretrained(folder)(picture, return_tensors="pt")["pixel_values"]
    ours = one.preprocessing.transform()(picture)
    assert prepared.shape == (1, 3, PIXELS, PIXELS) and pixels_apart(prepared[0], ours) < 3  # resampled by other code


def pixels_apart(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """The largest difference of two crops 3,P,P in grey levels; where a crop's middle is half a pixel, either side will do."""
    pixels = ours.shape[-1]
    inner = ours[:, 1:-1, 1:-1]
    moved = [theirs[:, y : y + pixels - 2, x : x + pixels - 2] for y in range(3) for x in range(3)]
    assert theirs.shape == ours.shape
    return min(float((one - inner).abs().max()) for one in moved) * 255 * 0.3


@pytest.mark.parametrize(("resize", "pixels"), [(93, 64), (59, 48), (438, 384), (512, 448), (224, 224)])
def test_the_sizes_that_others_are_told_come_back_whatever_they_round(written, resize, pixels):
    import timm
    import transformers

    one = backbone("resnet18")
    one = Backbone(**{**vars(one), "preprocessing": Preprocessing(resize, pixels, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))})
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 740, 3), dtype=np.uint8))
    ours = one.preprocessing.transform()(picture)
    processor = transformers.AutoImageProcessor.from_pretrained(written(one, "transformers"))
    assert pixels_apart(processor(picture, return_tensors="pt")["pixel_values"][0], ours) < 3
    config = json.loads((written(one, "timm") / "config.json").read_text())["pretrained_cfg"]
    prepare = timm.data.create_transform(**timm.data.resolve_data_config(config))
    assert pixels_apart(prepare(picture), ours) < 3


@pytest.mark.parametrize(("name", "stem"), [("resnet18", "imagenet"), ("resnet10", "small_stride1")])
def test_onnx_and_torchscript_take_pixels_of_any_number_of_images(written, name, stem):
    import onnx
    import onnxruntime

    one = backbone(name, stem)
    path = written(one, "onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(path.read_bytes())
    script = torch.jit.load(written(one, "torchscript"))
    for rows in (1, 5, 32):
        expected = features(one, images(rows))
        assert expected.std() > 0.01
        torch.testing.assert_close(torch.tensor(session.run(None, {"images": images(rows).numpy()})[0]), expected, **CLOSE)
        torch.testing.assert_close(script(images(rows)), expected, **CLOSE)
    facts = json.loads(session.get_modelmeta().custom_metadata_map["moco_ray"])
    assert facts == {"resize_pixels": 73, "image_pixels": PIXELS, "origin": read_backbone(str(path.parent / "source.safetensors")).origin}


DETECTRON2 = {  # detectron2/modeling/backbone/resnet.py: BasicStem, BasicBlock, BottleneckBlock, make_stage (res2 to res5)
    "conv1.weight": "stem.conv1.weight", "bn1.running_var": "stem.conv1.norm.running_var",
    "layer1.0.conv1.weight": "res2.0.conv1.weight", "layer1.0.bn1.weight": "res2.0.conv1.norm.weight",
    "layer1.0.downsample.0.weight": "res2.0.shortcut.weight", "layer1.0.downsample.1.bias": "res2.0.shortcut.norm.bias",
    "layer3.5.bn3.running_mean": "res4.5.conv3.norm.running_mean", "layer4.2.conv3.weight": "res5.2.conv3.weight",
}  # fmt: skip


def test_detectron2_and_mmpretrain_files_have_their_documented_names_and_pixels(written):
    one = backbone("resnet50")
    folder = written(one, "detectron2")
    held = pickle.loads((folder / "backbone.pkl").read_bytes())
    assert held["matching_heuristics"] is True and len(held["model"]) == len(one.tensors)
    for ours, theirs in DETECTRON2.items():
        assert np.array_equal(held["model"][theirs], one.tensors[ours].numpy()), theirs
    assert not [name for name in held["model"] if "layer" in name or "bn" in name or "downsample" in name]
    settings = (folder / "backbone.yaml").read_text()
    assert "PIXEL_MEAN: [127.5, 102.0, 76.5]" in settings and "PIXEL_STD: [51.0, 63.75, 76.5]" in settings
    assert 'FORMAT: "RGB"' in settings and "STRIDE_IN_1X1: False" in settings and "DEPTH: 50" in settings
    assert "RES2_OUT_CHANNELS" not in settings
    state = torch.load(written(one, "mmpretrain"), weights_only=True)["state_dict"]  # mmpretrain/models/backbones/resnet.py
    assert state.keys() == {f"backbone.{name}" for name in one.tensors}
    assert all(torch.equal(state[f"backbone.{name}"], value) for name, value in one.tensors.items())


def test_detectron2_is_told_of_the_narrow_stage_of_a_resnet_18(written):
    settings = (written(backbone("resnet18"), "detectron2") / "backbone.yaml").read_text()
    assert "    DEPTH: 18\n" in settings and "    RES2_OUT_CHANNELS: 64\n" in settings


DETECTRON2_DEFAULTS = {  # detectron2/config/defaults.py at 084acd0: a key's default, whose type a config's value must have
    "VERSION": 2, "MODEL.META_ARCHITECTURE": "GeneralizedRCNN", "MODEL.WEIGHTS": "", "MODEL.MASK_ON": False,
    "MODEL.PIXEL_MEAN": [103.53, 116.28, 123.675], "MODEL.PIXEL_STD": [1.0, 1.0, 1.0], "MODEL.BACKBONE.FREEZE_AT": 2,
    "MODEL.RESNETS.DEPTH": 50, "MODEL.RESNETS.NORM": "FrozenBN", "MODEL.RESNETS.STRIDE_IN_1X1": True, "MODEL.RESNETS.RES2_OUT_CHANNELS": 256,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 6000, "MODEL.RPN.POST_NMS_TOPK_TEST": 1000, "MODEL.ROI_HEADS.NAME": "Res5ROIHeads",
    "MODEL.ROI_HEADS.NUM_CLASSES": 80, "INPUT.FORMAT": "BGR", "INPUT.MIN_SIZE_TRAIN": [800], "INPUT.MIN_SIZE_TEST": 800,
    "DATASETS.TRAIN": [], "DATASETS.TEST": [], "SOLVER.IMS_PER_BATCH": 16, "SOLVER.BASE_LR": 0.001, "SOLVER.STEPS": [30000],
    "SOLVER.MAX_ITER": 40000, "SOLVER.WARMUP_ITERS": 1000, "TEST.PRECISE_BN.ENABLED": False,
}  # fmt: skip
RELEASED_C4 = {  # facebookresearch/moco at 90e244a, detection/configs: Base-RCNN-C4-BN.yaml and *_moco.yaml, without pixels and weights
    "MODEL.META_ARCHITECTURE": "GeneralizedRCNN", "MODEL.RPN.PRE_NMS_TOPK_TEST": 6000, "MODEL.RPN.POST_NMS_TOPK_TEST": 1000,
    "MODEL.ROI_HEADS.NAME": "Res5ROIHeadsExtraNorm", "MODEL.BACKBONE.FREEZE_AT": 0, "MODEL.RESNETS.NORM": "naiveSyncBN",
    "MODEL.RESNETS.STRIDE_IN_1X1": False, "TEST.PRECISE_BN.ENABLED": True, "SOLVER.IMS_PER_BATCH": 16, "SOLVER.BASE_LR": 0.02,
    "INPUT.FORMAT": "RGB", "INPUT.MIN_SIZE_TEST": 800,
}  # fmt: skip
RELEASED_PROTOCOLS = {
    "voc_R_50_C4_24k.yaml": {
        "MODEL.MASK_ON": False, "MODEL.ROI_HEADS.NUM_CLASSES": 20, "INPUT.MIN_SIZE_TRAIN": list(range(480, 801, 32)),
        "DATASETS.TRAIN": ["voc_2007_trainval", "voc_2012_trainval"], "DATASETS.TEST": ["voc_2007_test"],
        "SOLVER.STEPS": [18000, 22000], "SOLVER.MAX_ITER": 24000, "SOLVER.WARMUP_ITERS": 100,
    },
    "coco_R_50_C4_2x.yaml": {
        "MODEL.MASK_ON": True, "MODEL.ROI_HEADS.NUM_CLASSES": 80, "INPUT.MIN_SIZE_TRAIN": list(range(640, 801, 32)),
        "DATASETS.TRAIN": ["coco_2017_train"], "DATASETS.TEST": ["coco_2017_val"], "SOLVER.STEPS": [120000, 160000], "SOLVER.MAX_ITER": 180000,
        "SOLVER.WARMUP_ITERS": 1000,  # Detectron2's default, which the released config leaves
    },
}  # fmt: skip


def flat(tree: dict, prefix: str = "") -> dict:
    """MODEL: {WEIGHTS: x} -> MODEL.WEIGHTS: x."""
    found = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def detectron2_config(path: Path) -> dict:
    """A config as Detectron2 would take it: every key is one of its own, and every value has its default's type."""
    config = flat(yaml.safe_load(path.read_text()))
    for key, value in config.items():
        assert type(value) is type(DETECTRON2_DEFAULTS[key]), (path.name, key)
    return config


def test_detectron2_s_c4_configs_are_the_released_protocol_with_the_run_s_pixels_and_weights(written):
    folder = written(backbone("resnet50"), "detectron2")
    assert sorted(p.name for p in folder.iterdir()) == sorted(["backbone.pkl", "backbone.yaml", *RELEASED_PROTOCOLS])
    for name, protocol in RELEASED_PROTOCOLS.items():
        config = detectron2_config(folder / name)
        assert Path(config.pop("MODEL.WEIGHTS")) == folder / "backbone.pkl"
        assert config.pop("MODEL.PIXEL_MEAN") == [127.5, 102.0, 76.5] and config.pop("MODEL.PIXEL_STD") == [51.0, 63.75, 76.5]
        assert config.pop("MODEL.RESNETS.DEPTH") == 50 and config.pop("VERSION") == 2
        assert config == RELEASED_C4 | protocol
        assert f"--config-file {name}" in (folder / name).read_text()
    assert "lie beside this file" in (folder / "backbone.yaml").read_text()


def test_detectron2_s_configs_name_the_weights_of_a_folder_given_by_a_relative_or_a_strange_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("one.safetensors").write_bytes(backbone("resnet50").to_bytes())
    for target in ("plain", 'with space "and: quotes" #1'):
        export("one.safetensors", "detectron2", target)
        for name in RELEASED_PROTOCOLS:
            assert Path(detectron2_config(tmp_path / target / name)["MODEL.WEIGHTS"]) == tmp_path / target / "backbone.pkl"


def test_a_resnet_18_gets_no_c4_config_and_is_told_so(written):
    folder = written(backbone("resnet18"), "detectron2")
    assert sorted(p.name for p in folder.iterdir()) == ["backbone.pkl", "backbone.yaml"]
    assert "there is none for a resnet18" in (folder / "backbone.yaml").read_text()
    assert detectron2_config(folder / "backbone.yaml")["MODEL.RESNETS.RES2_OUT_CHANNELS"] == 64


@pytest.fixture(scope="module")
def learned():
    """A learner after one step of made-up gradients, and its recipe: MoCo v2 on a ResNet-18."""
    recipe = Recipe.of_overrides([
        "encoder.backbone=resnet18", "encoder.feature_dim=32", "batch.global_batch_size=16", "batch.bn_group_size=4", "contrast.queue_keys=64",
        "augment.image_pixels=64", "schedule.steps=30",
    ])  # fmt: skip
    learner = Learner.new(recipe)
    for encoder, seed in ((learner.f_q, 1), (learner.f_k, 2)):
        encoder.backbone.load_state_dict(weights("resnet18", seed=seed))
    for number, parameter in enumerate(learner.f_q.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    learner.optimizer.step()
    learner.queue.enqueue(nn.functional.normalize(torch.rand(16, 32)), step=0)
    learner.step = 25
    return learner, recipe


def stored(run: Store, learned, steps: tuple[int, ...] = (25,)) -> None:
    """A run folder with checkpoints, as a run leaves it."""
    learner, recipe = learned
    about = {"recipe_fingerprint": recipe.fingerprint(), "data_fingerprint": "d", "order_version": order.VERSION}
    for name, text in (("recipe.toml", recipe.toml()), ("run.json", "{}"), ("plan.json", json.dumps({"steps_per_epoch": 10}))):
        run.write(name, text.encode())
    for step in steps:
        checkpoint.save(run, step, 1, checkpoint.pack(learner.state_dict(), about), about, keep=9)


@pytest.fixture
def run(tmp_path, learned) -> Store:
    folder = Store(str(tmp_path / "runs" / "one"))
    stored(folder, learned)
    return folder


class Released(nn.Module):
    """The released MoCo's tensors, by its moco/builder.py: a ResNet with the head in place of `fc`, twice, and the queue C,K."""

    def __init__(self, dim: int, keys: int, mlp: bool):
        super().__init__()
        for name in ("encoder_q", "encoder_k"):
            encoder = torchvision.models.resnet18(num_classes=dim)
            if mlp:
                encoder.fc = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), encoder.fc)
            setattr(self, name, encoder)
        self.register_buffer("queue", torch.randn(dim, keys))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))


def test_a_whole_run_in_the_released_layout_is_taken_by_the_released_model_and_its_optimizer(tmp_path, run, learned, capsys):
    assert main(["export", run.uri, "--to", "moco", "--output", str(tmp_path / "moco.pth.tar")]) == 0
    assert "main_moco.py --resume" in capsys.readouterr().out
    held = torch.load(tmp_path / "moco.pth.tar", weights_only=True)
    assert held["epoch"] == 2 and held["arch"] == "resnet18"
    model = nn.ModuleDict({"module": Released(32, 64, mlp=True)})  # DistributedDataParallel's prefix
    model.load_state_dict(held["state_dict"])  # strict
    learner, _ = learned
    released = model["module"]
    assert torch.equal(released.queue, learner.queue.keys.T) and released.queue_ptr.tolist() == [16]
    x = standardised(images(4))
    with torch.no_grad():
        for theirs, ours in ((released.encoder_q, learner.f_q), (released.encoder_k, learner.f_k)):
            torch.testing.assert_close(theirs.eval()(x), ours.eval()(x), **CLOSE)
            ours.train()
    released.encoder_k.requires_grad_(False)
    optimizer = torch.optim.SGD(released.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)  # main_moco.py: of both
    optimizer.load_state_dict(held["optimizer"])
    for number, parameter in enumerate(released.encoder_q.parameters()):
        buffer = optimizer.state[parameter]["momentum_buffer"]
        assert buffer.shape == parameter.shape and (buffer - number).abs().max() < 1e-3  # weight decay adds a little
    released.encoder_q.train()(x).sum().backward()
    optimizer.step()


def test_load_backbone_takes_a_run_a_checkpoint_or_a_file_and_its_transform_is_the_evaluation_s_view(tmp_path, run, learned):
    stored(run, learned, (26,))
    learner, recipe = learned
    file = tmp_path / "out.safetensors"
    export(run.uri, "safetensors", str(file))
    picture = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    crop = centre_crop(torch.from_numpy(picture).permute(2, 0, 1), 73, 64)  # 64 * 256 / 224: a run without an evaluation
    x = normalise(torch.from_numpy(crop)[None], recipe.augment)
    with torch.no_grad():
        expected = learner.f_q.backbone.eval()(x)
        learner.f_q.train()
        for place in (run.uri, f"{run.uri}/checkpoints/step-000000025.a000001.pt", file):
            module = moco_ray.load_backbone(place)
            assert not module.training and module.features == 512
            torch.testing.assert_close(module.transform(Image.fromarray(picture)), x[0], **CLOSE)
            torch.testing.assert_close(module(x), expected, **CLOSE)
            assert module.state_dict().keys() == build_backbone("resnet18", "imagenet").state_dict().keys()
            assert module.origin["step"] == (25 if "checkpoints" in str(place) else 26)
            assert module.origin["recipe_fingerprint"] == recipe.fingerprint()
    colours = Image.fromarray(picture)
    for mode in ("L", "P", "1", "LA", "RGBA", "CMYK"):
        other = colours.convert(mode)
        assert torch.equal(module.transform(other), module.transform(other.convert("RGB"))), mode
    with pytest.raises(ValueError, match="more than 8 bits"):
        module.transform(Image.fromarray(picture[..., 0].astype(np.uint16)))
    turned = colours.copy()
    turned.getexif()[0x0112] = 6  # EXIF: turn it by 90 degrees
    turned.info["exif"] = turned.getexif().tobytes()
    assert torch.equal(module.transform(turned), module.transform(colours.transpose(Image.Transpose.ROTATE_270)))
    grey = torch.from_numpy(picture[..., :1]).permute(2, 0, 1)
    assert torch.equal(module.transform(grey), module.transform(grey.expand(3, -1, -1)))


def test_a_run_without_an_evaluation_is_judged_through_the_view_that_its_backbone_is_exported_with(run, learned):
    backbone, recipe, _ = opened(run.uri, ["evaluation.bank_uri=a", "evaluation.query_uri=b", "evaluation.neighbours=1"], None)
    assert recipe.evaluation.resize_pixels == backbone.preprocessing.resize_pixels == 73 and recipe.augment.image_pixels == 64


def test_the_readme_s_lines_for_classification_and_detection_run(run):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text.partition("## Using the backbone")[2].partition("\n## ")[0], re.S)
    assert len(blocks) == 2
    pictures = [Image.fromarray(np.full((70, 90, 3), value, np.uint8)) for value in (10, 200)]
    names = {"place": run.uri, "images": pictures, "classes": 5}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["logits"].shape == (2, 5) and names["logits"].requires_grad
    boxes = {"boxes": torch.tensor([[5.0, 5.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    losses = names["detector"].train()([torch.rand(3, 64, 64)], [boxes])
    sum(losses.values()).backward()
    assert names["backbone"].layer4[0].conv1.weight.grad.abs().sum() > 0 and names["backbone"].layer1[0].conv1.weight.grad.abs().sum() > 0


def test_a_backbone_is_read_and_written_in_object_storage(no_aws, rclone, monkeypatch, tmp_path, learned):
    use(monkeypatch, rclone)
    bucket = filled(rclone, {})
    stored(Store.at(f"s3://{bucket}/runs/one"), learned)
    export(f"s3://{bucket}/runs/one", "transformers", f"s3://{bucket}/out/hf")
    export(f"s3://{bucket}/runs/one", "safetensors", f"s3://{bucket}/out/one.safetensors")
    names = [entry.name for entry in Store.at(f"s3://{bucket}/out").list()]
    assert names == ["hf/config.json", "hf/model.safetensors", "hf/preprocessor_config.json", "one.safetensors"]
    one, again = read_backbone(f"s3://{bucket}/runs/one"), read_backbone(f"s3://{bucket}/out/one.safetensors")
    assert one.preprocessing == again.preprocessing and one.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(value, again.tensors[key]) for key, value in one.tensors.items())
    for to, name, file in (("transformers", "hf", "hf/config.json"), ("safetensors", "one.safetensors", "one.safetensors")):
        assert "is there already, the same" in export(f"s3://{bucket}/runs/one", to, f"s3://{bucket}/out/{name}")  # a job that is run again
        Store.at(f"s3://{bucket}/out").write(file, b"somebody else's")
        with pytest.raises(UserError, match="is there already; remove it"):
            export(f"s3://{bucket}/runs/one", to, f"s3://{bucket}/out/{name}")
        assert Store.at(f"s3://{bucket}/out").read(file) == b"somebody else's"


def told(capsys, *words: str) -> str:
    """A command's one line of error."""
    capsys.readouterr()
    assert main(list(words)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("moco-ray: error: ")
    return error


def test_what_cannot_be_exported_is_told_in_one_line_before_anything_is_written(tmp_path, run, learned, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = tmp_path / "small.safetensors"
    small.write_bytes(backbone("resnet18", "small_stride1").to_bytes())
    for to in ("torchvision", "timm", "transformers", "detectron2", "mmpretrain"):
        assert f"{to} has no ResNet with the stem small_stride1" in told(capsys, "export", str(small), "--to", to)
    ten = tmp_path / "ten.safetensors"
    ten.write_bytes(backbone("resnet10").to_bytes())
    for to in ("torchvision", "timm", "detectron2", "mmpretrain"):
        assert f"{to} knows no resnet10" in told(capsys, "export", str(ten), "--to", to)
    assert "ends with .safetensors" in told(capsys, "export", str(ten), "--to", "safetensors", "--output", "out.bin")
    assert "--to tensorflow: unknown; choose one of safetensors, torchvision" in told(capsys, "export", run.uri, "--to", "tensorflow")
    assert "has no run.json" in told(capsys, "export", str(tmp_path / "nothing"), "--to", "timm")
    assert "there is no file" in told(capsys, "export", "away.safetensors", "--to", "timm")
    absent = f"{run.uri}/checkpoints/step-000000024.pt"
    assert "there are checkpoints/step-000000025.a000001.pt" in told(capsys, "export", absent, "--to", "timm")
    content = small.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[: len(content) // 2])
    assert "is no whole .safetensors file" in told(capsys, "export", "cut.safetensors", "--to", "onnx")
    for change in ({"name": "vit"}, {"stem": "large"}, {"preprocessing": {"other": 1}}, {"name": None}):
        about = {"version": 1, "name": "resnet18", "stem": "imagenet", "preprocessing": vars(backbone().preprocessing), "origin": {}} | change
        (tmp_path / "bad.safetensors").write_bytes(bytes_of_tensors({"x": torch.zeros(1)}, {"moco_ray": json.dumps(about)}))
        assert "the header of bad.safetensors is damaged" in told(capsys, "export", "bad.safetensors", "--to", "torchvision"), change
    (tmp_path / "bad.safetensors").write_bytes(bytes_of_tensors({"x": torch.zeros(1)}, {"moco_ray": json.dumps(about | {"name": "resnet18"})}))
    assert "does not hold the tensors of the resnet18" in told(capsys, "export", "bad.safetensors", "--to", "torchvision")
    (tmp_path / "bad.safetensors").unlink()
    (tmp_path / "theirs.safetensors").write_bytes(bytes_of_tensors({"conv1.weight": torch.zeros(1)}))
    assert "`moco-ray import theirs.safetensors`" in told(capsys, "export", "theirs.safetensors", "--to", "onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.safetensors", "runs", "small.safetensors", "ten.safetensors", "theirs.safetensors"]
    assert main(["export", run.uri, "--to", "torchvision"]) == 0  # the name tells run, step and format
    assert main(["export", run.uri, "--to", "torchvision"]) == 0  # the same again
    (tmp_path / "one-step25-torchvision.pth").write_bytes(b"somebody else's")
    assert "is there already" in told(capsys, "export", run.uri, "--to", "torchvision")
    text = run.read("recipe.toml").decode().replace("temperature = 0.2", "temperature = 0.3")
    run.write("recipe.toml", text.encode())
    assert "put the recipe.toml back" in told(capsys, "export", run.uri, "--to", "timm")


# Other trainers' files: their attributes' names, as their own modules have them


def prefixed(prefix: str, tensors: dict) -> dict:
    return {prefix + name: value for name, value in tensors.items()}


CHILDREN = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}  # of torchvision's ResNet
GENERATED = {"conv1": "0", "bn1": "1", "layer1": "2", "layer2": "3", "layer3": "4", "layer4": "5"}  # of lightly's ResNetGenerator
HEAD = {"0.weight": torch.zeros(8, 8)}


def by_place(places: dict, tensors: dict) -> dict:
    parted = {name.partition("."): value for name, value in tensors.items()}
    return {f"{places[first]}.{rest}": value for (first, _, rest), value in parted.items()}


def foreign_files(right: dict, wrong: dict) -> dict:
    """name -> what torch.save was given: `right` is the network that learned by gradient, `wrong` a slow copy of it."""
    released = prefixed("module.encoder_k.", wrong) | prefixed("module.encoder_q.", right) | {"module.queue": torch.zeros(8, 4)}
    v2_head = prefixed("module.encoder_q.fc.", HEAD)
    generated = [{k.replace("downsample", "shortcut"): v for k, v in by_place(GENERATED, one).items()} for one in (right, wrong)]
    return {
        "the released MoCo v1": {"epoch": 200, "arch": "resnet18", "state_dict": released | {"module.encoder_q.fc.weight": torch.zeros(8, 512)}},
        "the released MoCo v2": {"epoch": 800, "arch": "resnet18", "state_dict": released | v2_head, "optimizer": {"state": {}, "param_groups": []}},
        "solo-learn": {"state_dict": prefixed("momentum_backbone.", wrong) | prefixed("backbone.", right) | prefixed("projector.", HEAD), "hyper_parameters": {"method": "mocov2plus"}},
        "lightly, its ImageNet recipe": {"state_dict": prefixed("backbone.", wrong) | prefixed("query_backbone.", right) | prefixed("projection_head.", HEAD)},
        "lightly, its ImageNet recipe of DINO": {"state_dict": prefixed("backbone.", wrong) | prefixed("student_backbone.", right)},
        "lightly, its examples": {"state_dict": prefixed("backbone_momentum.", by_place(CHILDREN, wrong)) | prefixed("backbone.", by_place(CHILDREN, right))},
        "lightly, its tutorials": {"state_dict": prefixed("backbone_momentum.", generated[1]) | prefixed("backbone.", generated[0])},
        "solo-learn, its first releases": {"state_dict": prefixed("momentum_encoder.", wrong) | prefixed("encoder.", right) | prefixed("projector.", HEAD)},
        "VISSL": {"classy_state_dict": {"base_model": {"model": {"trunk": prefixed("_feature_blocks.", right), "heads": HEAD}}}, "iteration": 5},
        "MMSelfSup or MMPretrain": {"meta": {"epoch": 3}, "state_dict": prefixed("encoder_k.0.", wrong) | prefixed("backbone.", right) | prefixed("neck.", HEAD)},
        "OpenSelfSup": {"meta": {}, "state_dict": prefixed("encoder_k.0.", wrong) | prefixed("encoder_q.0.", right) | prefixed("backbone.", right) | {"queue": torch.zeros(8, 4)}},
        "torchvision or timm": right | {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)},
    }  # fmt: skip


@pytest.mark.parametrize("tool", list(foreign_files({}, {})))
def test_another_trainer_s_file_is_recognised_and_gives_the_query_network_s_features(tmp_path, capsys, monkeypatch, tool):
    monkeypatch.chdir(tmp_path)
    one = backbone("resnet18")
    torch.save(foreign_files(one.tensors, weights("resnet18", seed=9))[tool], "theirs.pth.tar")
    words = ["--mean", "0.5", "0.4", "0.3", "--std", "0.2", "0.25", "0.3", "--image-pixels", str(PIXELS)]
    assert main(["import", "theirs.pth.tar", *words]) == 0
    out = capsys.readouterr().out
    name = re.sub(r" v[12]| of DINO|, its first releases", "", tool)
    assert f"theirs.pth.tar: {name}, resnet18" in out and "120 tensors matched" in out
    assert "missing" not in out and "unexpected" not in out
    module = moco_ray.load_backbone("theirs-backbone.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(module(standardised(images())), features(one, images()), **TO_THE_BIT)
    assert read_backbone("theirs-backbone.safetensors").preprocessing == one.preprocessing
    assert "is there already" in told(capsys, "import", "theirs.pth.tar")


def test_with_a_key_missing_renamed_or_of_another_shape_a_file_is_refused_by_name_unless_partial_is_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = backbone("resnet18")
    slow, key = weights("resnet18", seed=9), "layer4.1.bn2.running_mean"
    lacking = {name: value for name, value in one.tensors.items() if name != key}
    for tool, held in foreign_files(lacking, slow).items():
        torch.save(held, "theirs.pth")
        assert f"1 missing: {key}" in told(capsys, "import", "theirs.pth"), tool
    for tool, held in foreign_files(lacking | {"layer4.1.norm2.running_mean": one.tensors[key]}, slow).items():
        torch.save(held, "theirs.pth")
        assert f"1 missing: {key}; 1 unexpected: layer4.1.norm2.running_mean" in told(capsys, "import", "theirs.pth"), tool
    torch.save(one.tensors | {"layer2.0.conv1.weight": torch.zeros(3)}, "shape.pth")
    assert "1 of another shape: layer2.0.conv1.weight" in told(capsys, "import", "shape.pth")
    assert not list(tmp_path.glob("*.safetensors"))
    assert main(["import", "shape.pth", "--partial"]) == 0
    taken = read_backbone("shape-backbone.safetensors")
    assert taken.origin["drawn_anew"] == ["layer2.0.conv1.weight"] and taken.tensors["layer2.0.conv1.weight"].std() > 0.01
    assert torch.equal(taken.tensors["layer4.1.bn2.running_mean"], one.tensors["layer4.1.bn2.running_mean"])


def test_strange_hostile_and_ambiguous_files_are_refused_and_nothing_in_them_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Bomb:
        def __reduce__(self):
            return (open, ("exploded", "w"))

    torch.save({"state_dict": weights("resnet18"), "hyper": Bomb()}, "bomb.pth")
    assert "which were not executed" in told(capsys, "import", "bomb.pth") and not (tmp_path / "exploded").exists()
    (tmp_path / "cut.pth").write_bytes((tmp_path / "bomb.pth").read_bytes()[:5000])
    assert "cannot be read as a checkpoint" in told(capsys, "import", "cut.pth")
    torch.save({"state_dict": {"blocks.0.attn.qkv.weight": torch.zeros(3)}}, "vit.pth")
    assert "it holds blocks.0.attn.qkv.weight" in told(capsys, "import", "vit.pth")
    one, slow = weights("resnet18"), weights("resnet18", seed=9)
    torch.save({"state_dict": prefixed("backbone.", one) | prefixed("second_backbone.", slow)}, "two.pth")
    assert "two networks, backbone. and second_backbone." in told(capsys, "import", "two.pth")
    torch.save({"state_dict": prefixed("backbone.", weights("resnet18", "small_stride1")) | prefixed("projector.", HEAD)}, "solo.pth")
    assert "which pads by 2" in told(capsys, "import", "solo.pth", "--stem", "small_stride1")
    torch.save({5: torch.zeros(1), "layer1": torch.zeros(1), "layer1.x.conv1.weight": torch.zeros(1), "conv1.weight": one["conv1.weight"]}, "odd.pth")
    assert "blocks (0, 0, 0, 0)" in told(capsys, "import", "odd.pth")
    (tmp_path / "ours.safetensors").write_bytes(backbone().to_bytes())
    assert "is a backbone of moco_ray already" in told(capsys, "import", "ours.safetensors")
    shared = dict(one) | {"layer1.0.bn1.bias": one["layer1.0.bn1.weight"]}
    torch.save(shared, "shared")
    assert main(["import", "shared"]) == 0 and read_backbone("shared-backbone.safetensors").origin["layout"] == "torchvision or timm"
    assert "finite" in told(capsys, "import", "shared", "--output", "new.safetensors", "--std", "0.2", "nan", "0.3")
    assert "there is no file" in told(capsys, "import", "away.pth")
    deep = dict(torchvision.models.resnet101().state_dict())
    torch.save(deep, "deep.pth")
    assert "a ResNet of Bottleneck blocks (3, 4, 23, 3)" in told(capsys, "import", "deep.pth", "--partial")
    torch.save(weights("resnet18", "small_stride1"), "small.pth")
    assert "give --stem small_stride1 or --stem small_stride2" in told(capsys, "import", "small.pth")
    assert main(["import", "small.pth", "--stem", "small_stride2"]) == 0
    assert read_backbone("small-backbone.safetensors").stem == "small_stride2"
    torch.save(weights("resnet18"), "large.pth")
    assert "leave --stem away" in told(capsys, "import", "large.pth", "--stem", "small_stride1")
    old = {key: value for key, value in weights("resnet18").items() if "num_batches" not in key}
    torch.save(old, "old.pth")
    capsys.readouterr()
    assert main(["import", "old.pth"]) == 0 and "no num_batches_tracked" in capsys.readouterr().out
