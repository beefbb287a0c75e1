"""`moco-ray export`: a backbone in the formats of the tools that people use; and a whole run in the released MoCo's.

Responsible for the content of each format and for writing it whole. What a format cannot hold is refused, not bent. The names
are layouts.py's. Not responsible for reading runs (backbone.py), nor for other people's files (foreign.py).
"""

import io
import json
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as bytes_of_tensors
from torch import Tensor, nn

from moco_ray import detectron2_configs, layouts
from moco_ray.backbone import SUFFIX, Backbone, Preprocessing, Trained, file_at, read_backbone, read_checkpoint
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.method.encoder import BACKBONES, EXPANSION

Files = dict[str, bytes]  # by name below the target, in the order of writing; "" is the target itself
OPSET = 18


@dataclass(frozen=True)
class Format:
    """One way to write a backbone."""

    files: Callable[[Backbone], Files]
    suffix: str  # of the target; "" for a folder
    use: str  # how its tool takes it; {target} and {name} are filled in
    beside: Callable[[Backbone, str], Files] = lambda backbone, target: {}  # files that tell where the target lies
    stock: bool = False  # only for the networks that its tool knows by name: with the usual stem, no ResNet-10


class FromPixels(nn.Module):
    """N,3,P,P uint8 RGB of any P -> N,D float32: the standardisation and the backbone. Resizing is the caller's."""

    def __init__(self, backbone: Backbone):
        super().__init__()
        self.backbone = backbone.module()
        for name, values in (("mean", backbone.preprocessing.mean), ("std", backbone.preprocessing.std)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone((images.float() / 255 - self.mean) / self.std)


def _own(backbone: Backbone) -> Files:
    return {"": backbone.to_bytes()}


def _torchvision(backbone: Backbone) -> Files:
    return {"": _torch_saved(backbone.tensors)}


def _mmpretrain(backbone: Backbone) -> Files:
    tensors = {f"backbone.{name}": tensor for name, tensor in backbone.tensors.items()}
    return {"": _torch_saved({"meta": {"moco_ray": json.dumps(backbone.origin)}, "state_dict": tensors})}


def _timm(backbone: Backbone) -> Files:
    """A folder for timm's `local-dir:`; timm's ResNets have torchvision's names."""
    preprocessing = backbone.preprocessing
    pixels = preprocessing.image_pixels
    config = {
        "architecture": backbone.name,
        "num_classes": 0,
        "num_features": backbone.features,
        "pretrained_cfg": {
            "num_classes": 0,
            "input_size": [3, pixels, pixels],
            "crop_pct": _crop_share(preprocessing),
            "interpolation": "bilinear",
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "first_conv": "conv1",
            "classifier": "fc",
        },
        "moco_ray": backbone.origin,
    }
    return {"model.safetensors": bytes_of_tensors(backbone.tensors, {"format": "pt"}), "config.json": _json(config)}


def _transformers(backbone: Backbone) -> Files:
    """A folder for `AutoModel.from_pretrained`: a ResNet with torchvision's place of the strides (v1.5)."""
    block, depths = BACKBONES[backbone.name]
    preprocessing = backbone.preprocessing
    config = {
        "architectures": ["ResNetModel"],
        "model_type": "resnet",
        "num_channels": 3,
        "embedding_size": 64,
        "hidden_sizes": [64 * EXPANSION[block] * 2**stage for stage in range(4)],
        "depths": list(depths),
        "layer_type": "bottleneck" if block == "Bottleneck" else "basic",
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        "torch_dtype": "float32",
        "moco_ray": backbone.origin,
    }
    pixels = preprocessing.image_pixels
    image_processor = {  # CLIP's class, for ConvNeXT's, which ResNets have there, warps from 384 pixels on
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": preprocessing.resize_pixels},
        "resample": 2,  # bilinear
        "do_center_crop": True,
        "crop_size": {"height": pixels, "width": pixels},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
    tensors = {layouts.transformers_name(name): tensor for name, tensor in backbone.tensors.items()}
    return {
        "model.safetensors": bytes_of_tensors(tensors, {"format": "pt"}),
        "preprocessor_config.json": _json(image_processor),
        "config.json": _json(config),
    }


def _crop_share(preprocessing: Preprocessing) -> float:
    """What timm divides the crop by, and rounds down, to get the size to resize to."""
    return preprocessing.image_pixels / (preprocessing.resize_pixels + 0.5)


def _detectron2(backbone: Backbone) -> Files:
    """As the released MoCo's converter writes it; beside it the settings that such a backbone needs."""
    model = {layouts.detectron2_name(name): tensor.numpy() for name, tensor in backbone.tensors.items()}
    held = {"model": model, "__author__": "moco_ray", "matching_heuristics": True}
    return {detectron2_configs.WEIGHTS: pickle.dumps(held), "backbone.yaml": detectron2_configs.settings(backbone).encode()}


def _detectron2_beside(backbone: Backbone, target: str) -> Files:
    """Of a ResNet-50, the published configs on VOC and COCO."""
    return {name: text.encode() for name, text in detectron2_configs.published(backbone, target).items()}


def _onnx(backbone: Backbone) -> Files:
    module, example = FromPixels(backbone).eval(), _example(backbone)
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError("the ONNX format needs two packages more: pip install 'moco_ray[onnx]'") from error
    rows = torch.export.Dim("rows")
    program = torch.onnx.export(
        module, (example,), dynamo=True, opset_version=OPSET, verbose=False, external_data=False,
        input_names=["images"], output_names=["features"], dynamic_shapes={"images": {0: rows}},
    )  # fmt: skip
    model = program.model_proto
    for key, value in _facts(backbone).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    return {"": model.SerializeToString()}


def _torchscript(backbone: Backbone) -> Files:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch wants torch.export instead; users of TorchScript are still there
        traced = torch.jit.freeze(torch.jit.trace(FromPixels(backbone).eval(), _example(backbone)))
        buffer = io.BytesIO()
        torch.jit.save(traced, buffer, _extra_files=_facts(backbone))
    return {"": buffer.getvalue()}


def _example(backbone: Backbone) -> Tensor:
    pixels = backbone.preprocessing.image_pixels
    return torch.zeros(2, 3, pixels, pixels, dtype=torch.uint8)


def _facts(backbone: Backbone) -> dict[str, str]:
    preprocessing = backbone.preprocessing
    sizes = {"resize_pixels": preprocessing.resize_pixels, "image_pixels": preprocessing.image_pixels}
    return {"moco_ray": json.dumps({**sizes, "origin": backbone.origin})}


def _released(trained: Trained) -> Files:
    """As the released MoCo's main_moco.py saves it: both encoders, the queue C,K, the optimizer, epoch and architecture.

    Differs in what it cannot hold: the step within the epoch and the ages of the keys are left out.
    """
    if not trained.recipe.optimizer.as_released:
        raise UserError(
            "--to moco: the released code resumes SGD that decays all parameters alike, and this run has another optimizer "
            f"(optimizer.name {trained.recipe.optimizer.name}); --to torchvision holds the backbone alone"
        )
    state, tensors = trained.state, {}
    for ours, theirs in (("query_encoder", "encoder_q"), ("key_encoder", "encoder_k")):
        for name, tensor in state[ours].items():
            part, _, rest = name.partition(".")
            rest = rest if part == "backbone" else f"fc.{rest}"  # the head replaces the classifier there
            tensors[f"module.{theirs}.{rest}"] = tensor.contiguous()
    queue = state["queue"]
    tensors["module.queue"] = queue["keys"].T.contiguous()
    tensors["module.queue_ptr"] = torch.tensor([queue["position"]], dtype=torch.int64)
    steps_per_epoch = json.loads(trained.folder.store.read("plan.json"))["steps_per_epoch"]
    held = {
        "epoch": trained.saved.step // steps_per_epoch,
        "arch": trained.recipe.encoder.backbone,
        "state_dict": tensors,
        "optimizer": _plain_optimizer(state["optimizer"]),
    }
    return {"": _torch_saved(held)}


def _plain_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """The same state for the released code's SGD: over the parameters of both encoders, the key's without a gradient and so
    without a state; not fused; buffers in the usual memory layout."""
    moved = {
        number: {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in held.items()}
        for number, held in state["state"].items()
    }
    (group,) = state["param_groups"]
    both = list(range(2 * len(group["params"])))  # encoder_q's come first
    return {"state": moved, "param_groups": [{**group, "params": both, "fused": None}]}


def _torch_saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


FORMATS = {
    "safetensors": Format(_own, SUFFIX, "moco_ray.load_backbone({target!r})"),
    "torchvision": Format(
        _torchvision, ".pth", "torchvision.models.{name}().load_state_dict(torch.load({target!r}), strict=False)  # fc.* stay new",
        stock=True,
    ),
    "timm": Format(_timm, "", 'timm.create_model("local-dir:{target}", pretrained=True)', stock=True),
    "transformers": Format(_transformers, "", "transformers.AutoModel.from_pretrained({target!r})"),
    "detectron2": Format(
        _detectron2, "", "MODEL.WEIGHTS {target}/backbone.pkl, with {target}/backbone.yaml; of a ResNet-50 also voc_*.yaml and coco_*.yaml",
        _detectron2_beside, stock=True,
    ),
    "mmpretrain": Format(
        _mmpretrain, ".pth", "init_cfg=dict(type='Pretrained', checkpoint={target!r}, prefix='backbone.')", stock=True
    ),
    "onnx": Format(_onnx, ".onnx", 'onnxruntime.InferenceSession({target!r}).run(None, {{"images": N,3,P,P uint8}})'),
    "torchscript": Format(_torchscript, ".ts", "torch.jit.load({target!r})(N,3,P,P uint8)"),
}
RELEASED = "moco"  # of a checkpoint, not of a backbone
NAMES = (*FORMATS, RELEASED)


def export(place: str, to: str, target: str | None = None) -> str:
    """Write what lies at `place` in a format of NAMES; lines for the user.

    `place` is what `read_backbone` takes; for "moco" a run or a checkpoint of one. `target` is a path or a URI that does not
    exist yet; None for a name in this folder. Raises UserError for what the format cannot hold, before anything is written.
    """
    if to not in NAMES:
        raise UserError(f"--to {to}: unknown; choose one of {', '.join(NAMES)}")
    if to == RELEASED:
        trained = read_checkpoint(place)
        backbone, format_ = trained.backbone(), Format(
            lambda _: _released(trained), ".pth.tar", "main_moco.py --resume {target}, with the same --moco-dim, --moco-k, --mlp", stock=True
        )
    else:
        backbone, format_ = read_backbone(place), FORMATS[to]
    _refuse_unfit(backbone, to, format_)
    target = (target or _default_target(backbone, to, format_)).rstrip("/")
    files = format_.files(backbone) | format_.beside(backbone, target)
    there = _already_there(target, format_, files)
    for name, content in files.items() if not there else ():
        _write(target, name, content)
    step = f", step {backbone.origin['step']}" if "step" in backbone.origin else ""
    size = sum(map(len, files.values())) / 1e6
    lines = [f"{target}: {'is there already, the same: ' if there else ''}{to}, {backbone.name}{step}, {backbone.features} features, {size:.1f} MB"]
    if backbone.stem != "imagenet":
        lines.append(f"its stem is {backbone.stem}: {_stem_words(backbone.stem)}")
    fetched = "" if "://" not in target or to == "safetensors" else "fetch it to a disk, then "
    return "\n".join([*lines, f"use it: {fetched}{format_.use.format(target=target, name=backbone.name)}"])


def _already_there(target: str, format_: Format, files: dict[str, bytes]) -> bool:
    """Whether all of it is, to the last byte. Raises UserError if something else is."""
    folder, (store, name) = Store.at(target), file_at(target)
    if format_.files is _own and not name.endswith(SUFFIX):
        raise UserError(f"--output {target}: the name of the file ends with {SUFFIX}")
    if store.size(name) is not None or (format_.suffix and folder.is_local and Path(folder.uri).is_dir()) or (not format_.suffix and folder.list()):
        if all(_held(target, one) == content for one, content in files.items()):
            return True
        raise UserError(f"{target} is there already; remove it, or give another --output")
    return False


def _held(target: str, name: str) -> bytes | None:
    store, name = (Store.at(target), name) if name else file_at(target)
    return store.read(name) if store.size(name) is not None else None


def _refuse_unfit(backbone: Backbone, to: str, format_: Format) -> None:
    if backbone.stem != "imagenet" and (format_.stock or to == "transformers"):
        raise UserError(
            f"{to} has no ResNet with the stem {backbone.stem} ({_stem_words(backbone.stem)}); take safetensors, onnx or torchscript"
        )
    if backbone.name == "resnet10" and format_.stock:
        raise UserError(f"{to} knows no resnet10; take safetensors, transformers, onnx or torchscript")


def _stem_words(stem: str) -> str:
    return f"conv1 is 3x3 with stride {stem[-1]} and padding 1, and there is no pooling after it"


def _default_target(backbone: Backbone, to: str, format_: Format) -> str:
    run = re.sub(r"[^\w.-]", "_", str(backbone.origin.get("run", "")).rstrip("/").rpartition("/")[2]) or backbone.name
    step = f"-step{backbone.origin['step']}" if "step" in backbone.origin else ""
    return f"{run}{step}-{to}{format_.suffix}"


def _write(target: str, name: str, content: bytes) -> None:
    """Whole or not at all."""
    store, name = (Store.at(target), name) if name else file_at(target)
    store.write(name, content)
