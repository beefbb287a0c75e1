"""The product of a run: the query backbone with all that its user needs, out of a run, a checkpoint or a file.

Responsible for reading it, for the one file that holds it (safetensors, with architecture, preprocessing and origin in its
header), and for the ready module. Not responsible for other people's formats (export.py, foreign.py).
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from PIL import Image, ImageOps
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of_bytes
from safetensors.torch import save as bytes_of_tensors
from torch import Tensor, nn

from moco_ray import checkpoint, recipe
from moco_ray.data.storage import S3_SCHEMES, Store, one_line
from moco_ray.errors import UserError
from moco_ray.method.encoder import build_backbone, width_of
from moco_ray.run_folder import RunFolder
from moco_ray.standing import Standing

if TYPE_CHECKING:
    from torchvision.transforms import v2

VERSION = 1
HEADER = "moco_ray"  # the key of our part of a file's header
SUFFIX = ".safetensors"
IN_A_RUN = re.compile(r"(?:(?P<run>.+)/)?(?P<name>checkpoints/(?:step-[^/]+|best))\.pt(?P<options>\?.*)?")
BEST = "checkpoints/best"


@dataclass(frozen=True)
class Preprocessing:
    """The evaluation's view of an image: shorter side to `resize_pixels` (bilinear, antialiased), centre crop, x / 255,
    minus mean, by std (red, green, blue)."""

    resize_pixels: int
    image_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def of(cls, recipe: recipe.Recipe) -> "Preprocessing":
        """The run's own evaluation; of a run without one, the published proportion of 256 to 224."""
        augment, evaluation = recipe.augment, recipe.evaluation
        resize = evaluation.resize_pixels if evaluation.bank_uri else round(augment.image_pixels * 256 / 224)
        return cls(resize, augment.image_pixels, tuple(augment.mean), tuple(augment.std))

    def transform(self) -> "v2.Compose":
        """A PIL image, or uint8 ...,3,H,W, to float32 ...,3,P,P.

        Images become RGB and stand upright as when they are decoded for a run: alpha is dropped, EXIF's orientation applied.
        """
        from torchvision.transforms import v2

        return v2.Compose([
            _upright_rgb, v2.ToImage(), v2.RGB(), v2.Resize(self.resize_pixels, antialias=True), v2.CenterCrop(self.image_pixels),
            v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.std), v2.ToPureTensor(),
        ])  # fmt: skip


@dataclass(frozen=True, eq=False)
class Backbone:
    """Weights and what is needed to use them. `tensors` have torchvision's names, without a classifier, on the CPU;
    float32, whatever the run computed in."""

    name: str  # resnet50
    stem: str
    tensors: dict[str, Tensor]
    preprocessing: Preprocessing
    origin: dict[str, Any]  # JSON: where it comes from

    @property
    def features(self) -> int:
        """D."""
        return width_of(self.name)

    def fingerprint(self) -> str:
        """SHA-256 of names and values, as 16 hex digits: the same weights have the same, whatever file they come from."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def module(self) -> nn.Module:
        """N,3,P,P float32 -> N,D in evaluation mode: torchvision's ResNet with `fc` an identity."""
        module = build_backbone(self.name, self.stem)
        module.load_state_dict(self.tensors)
        return module.eval()

    def to_bytes(self) -> bytes:
        """The content of a .safetensors file, from which `of_bytes` makes the same again."""
        about = {"version": VERSION, "name": self.name, "stem": self.stem, "preprocessing": asdict(self.preprocessing)}
        header = json.dumps({**about, "origin": self.origin})
        return bytes_of_tensors(self.tensors, {HEADER: header})  # one key: the order of several changes from call to call

    @classmethod
    def of_bytes(cls, content: bytes, place: str) -> "Backbone":
        """Raises UserError if it is damaged, or a file of somebody else."""
        try:
            tensors = tensors_of_bytes(content)
            header = own_header(content)
        except (SafetensorError, ValueError) as error:
            raise UserError(f"{place} is no whole .safetensors file ({one_line(error)}); export it again") from error
        if header is None:
            raise UserError(f"{place} was not written by moco_ray; make a backbone of it with `moco-ray import {place}`")
        try:
            about = json.loads(header)
            version = about["version"]
            if version == VERSION:
                preprocessing = {key: tuple(held) if isinstance(held, list) else held for key, held in about["preprocessing"].items()}
                backbone = cls(about["name"], about["stem"], tensors, Preprocessing(**preprocessing), dict(about["origin"]))
                fits = _shapes(backbone.tensors) == _shapes(_meta(backbone.name, backbone.stem))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"the header of {place} is damaged ({type(error).__name__}: {one_line(error)}); export it again") from error
        if version != VERSION:
            raise UserError(f"{place} has version {version!r} and this release reads {VERSION}; use the release that wrote it")
        if not fits:
            raise UserError(f"{place} does not hold the tensors of the {backbone.name} that its header names; export it again")
        return backbone


class Trained(NamedTuple):
    """A checkpoint with what its run says of it."""

    folder: RunFolder
    saved: checkpoint.Saved
    recipe: recipe.Recipe
    state: dict[str, Any]  # Learner.state_dict

    def backbone(self) -> Backbone:
        """The query encoder's, without its head."""
        tensors = {
            name.removeprefix("backbone."): _plain(tensor)
            for name, tensor in self.state["query_encoder"].items()
            if name.startswith("backbone.")
        }
        origin = {
            "run": self.folder.store.place(""),
            "checkpoint": self.saved.name,
            "step": self.saved.step,
            "sha256": self.saved.sha256,
            **{key: self.saved.about[key] for key in ("recipe_fingerprint", "data_fingerprint")},
        }
        encoder = self.recipe.encoder
        return Backbone(encoder.backbone, encoder.stem, tensors, Preprocessing.of(self.recipe), origin)


def read_checkpoint(place: str) -> Trained:
    """A run folder's newest checkpoint, or the named one, on a disk or as a URI: RUN/checkpoints/step-N.aM.pt, or
    RUN/checkpoints/best.pt for the one that did best in the evaluations.

    Raises UserError if there is none, if it is damaged, and if it is not of the recipe beside it.
    """
    named = IN_A_RUN.fullmatch(place)
    folder = RunFolder.existing((named["run"] or ".") + (named["options"] or "") if named else place)
    there = checkpoint.whole(folder.store)
    if not there:
        raise UserError(f"{folder.place} has no checkpoint yet; wait for the first, or go on with `moco-ray resume`")
    return read_saved(folder, _named(folder, named["name"], there) if named else there[0])


def read_saved(folder: RunFolder, saved: checkpoint.Saved) -> Trained:
    """A checkpoint of this run. Raises UserError if it is damaged, or not of the recipe beside it."""
    own = folder.recipe()
    if saved.about["recipe_fingerprint"] != own.fingerprint():
        raise UserError(
            f"{folder.store.place(saved.name)}.pt was made with recipe {saved.about['recipe_fingerprint']} and its run folder holds "
            f"{own.fingerprint()}; put the recipe.toml back that the run began with"
        )
    return Trained(folder, saved, own, checkpoint.load(folder.store, saved)[0])


def _named(folder: RunFolder, name: str, there: list[checkpoint.Saved]) -> checkpoint.Saved:
    """The one of `there` that is called so; "checkpoints/best" for the one that did best in the evaluations."""
    wanted = name
    if name == BEST:
        best = Standing.read(folder.store).best
        if best is None:
            raise UserError(f"{folder.place} has no best checkpoint: none was evaluated yet; give the run folder for its newest")
        wanted = best.name
    found = next((one for one in there if one.name == wanted), None)
    if found is None:
        raise UserError(
            f"{folder.store.place(wanted)}.pt is not among the whole checkpoints of its run; there are "
            f"{', '.join(f'{one.name}.pt' for one in there)}"
        )
    return found


def read_backbone(place: str) -> Backbone:
    """The backbone of a run, of one of its checkpoints, or in a .safetensors file that `moco-ray export` or `import` wrote.

    `place` is a path or a URI. Raises UserError if there is nothing of that kind.
    """
    store, name = file_at(place)
    if not name.endswith(SUFFIX):
        return read_checkpoint(place).backbone()
    if store.size(name) is None:
        raise UserError(f"there is no file {place}; `moco-ray export RUN --to safetensors` writes one")
    content = store.read(name)
    backbone = Backbone.of_bytes(content, place)
    return Backbone(**{**vars(backbone), "origin": {**backbone.origin, "file_sha256": hashlib.sha256(content).hexdigest()}})


def file_at(place: str) -> tuple[Store, str]:
    """A path or URI of a file as its folder and its name there."""
    path, mark, options = place.partition("?") if place.startswith(tuple(f"{scheme}://" for scheme in S3_SCHEMES)) else (place, "", "")
    folder, slash, name = path.rpartition("/")
    return Store.at((folder or slash or ".") + mark + options), name


def load_backbone(place: str | Path) -> nn.Module:
    """A pre-trained backbone, ready to use: N,3,P,P float32 -> N,D float32, in evaluation mode, on the CPU.

    `place` is what `read_backbone` takes. The module is torchvision's ResNet, whose `fc` is an identity; beside it lie
    `transform` (image -> 3,P,P, as in `Preprocessing.transform`), `features` (D), `preprocessing` and `origin` (where it
    comes from).
    Raises UserError if it cannot be read.
    """
    backbone = read_backbone(str(place))
    module = backbone.module()
    # Past nn.Module's own bookkeeping: a transform is a module too, and no part of the network.
    preprocessing = backbone.preprocessing
    vars(module).update(
        transform=preprocessing.transform(), features=backbone.features, preprocessing=preprocessing, origin=backbone.origin
    )
    return module


def own_header(content: bytes) -> str | None:
    """Our part of the header of a .safetensors file; None in others'. Raises ValueError if it is none."""
    held = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return held.get("__metadata__", {}).get(HEADER)


def _meta(name: str, stem: str) -> dict[str, Tensor]:
    """The tensors that a backbone has, without their values."""
    if stem not in get_args(recipe.Encoder.model_fields["stem"].annotation):
        raise ValueError(f"unknown stem {stem!r}")
    with torch.device("meta"):
        return build_backbone(name, stem).state_dict()


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _upright_rgb(image: Any) -> Any:
    """Of a PIL image; a tensor passes. Raises ValueError for 16 bits or floats a channel, whose scale is not known."""
    if not isinstance(image, Image.Image):
        return image
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"an image of mode {image.mode} has more than 8 bits a channel; scale it to 8 first")
    return ImageOps.exif_transpose(image.convert("RGB"))


def _plain(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
