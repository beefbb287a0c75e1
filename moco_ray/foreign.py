"""`moco-ray import`: a backbone out of another trainer's file, recognised by its names and compared tensor by tensor.

Responsible for reading such a file without executing anything in it, for saying what it is and what does not fit, and for
making it a file of ours. Nothing partial is taken without being asked for. Not responsible for the names (layouts.py).
"""

import argparse
import hashlib
import io
import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of_bytes
from torch import Tensor

from moco_ray.backbone import SUFFIX, Backbone, Preprocessing, file_at, own_header
from moco_ray.data.storage import one_line
from moco_ray.errors import UserError
from moco_ray.layouts import LAYOUTS, SOLO_LEARN, Layout
from moco_ray.method.encoder import BACKBONES, build_backbone

SHOWN = 4  # names of each kind in a message
COUNTER = "num_batches_tracked"  # older files have none, and nothing computes with it
HEADS = ("fc.", "head.")  # inside what others call the backbone
HARMLESS = [argparse.Namespace]  # beside what torch takes anyway: a bag of a command's arguments


@dataclass(frozen=True)
class Comparison:
    """What a file holds beside what the network has, by torchvision's names."""

    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    other_shape: list[str]
    left_out: list[str]  # the file's names of a head, a key encoder, a queue: no part of a backbone
    without_counters: bool

    @property
    def whole(self) -> bool:
        return not (self.missing or self.unexpected or self.other_shape)

    def lines(self) -> list[str]:
        """For the user."""
        said = [f"{len(self.matched)} tensors matched"]
        for what, names in (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.other_shape),
            ("left out, for they are no part of a backbone", self.left_out),
        ):
            if names:
                said.append(f"{len(names)} {what}: {_some(names)}")
        if self.without_counters:
            said.append(f"no {COUNTER}, as in older files: set to 0")
        return said


class Recognised(NamedTuple):
    """The tensors of a file in a known layout."""

    tool: str
    tensors: dict[str, Tensor]  # the backbone's, under torchvision's names
    others: list[str]  # the file's names of a head, a key encoder, a queue
    about: dict[str, Any]  # epoch and arch, where the file says them


def import_backbone(
    place: str, preprocessing: Preprocessing, stem: str | None = None, partial: bool = False
) -> tuple[Backbone, str, Comparison]:
    """The backbone in the file at `place` (a path or a URI), the tool that wrote it, and what fitted.

    `stem` is needed where the first convolution is 3x3, whose stride no file tells. With `partial`, what is missing is drawn
    anew and what is unexpected dropped. Raises UserError if nothing is recognised, and without `partial` for what does not fit.
    """
    content = read_file(place)
    found = _recognised(opened(content, place), place)
    theirs = found.tensors
    name, stem = _architecture(theirs, place), _stem(found, stem, place)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own = build_backbone(name, stem).state_dict()
    comparison = _compare(found, own)
    if not comparison.whole and not partial:
        raise UserError(
            f"{place} ({found.tool}, {name}) does not fit: {'; '.join(comparison.lines())}. Give a whole file, or --partial to "
            "take what fits and draw the rest anew"
        )
    tensors = {key: _plain(theirs[key], own[key]) if key in comparison.matched else value for key, value in own.items()}
    origin = {
        "imported_from": place.partition("?")[0].rstrip("/").rpartition("/")[2],
        "layout": found.tool,
        "file_sha256": hashlib.sha256(content).hexdigest(),
        **found.about,
        "drawn_anew": [*comparison.missing, *comparison.other_shape],
    }
    return Backbone(name, stem, tensors, preprocessing, origin), found.tool, comparison


def import_file(place: str, output: str | None, preprocessing: Preprocessing, stem: str | None, partial: bool) -> str:
    """Write the imported backbone as a .safetensors file of ours; lines for the user. Raises UserError as above."""
    output = output or PurePosixPath(PurePosixPath(place.partition("?")[0]).name.removesuffix(".tar")).stem + "-backbone" + SUFFIX
    store, name = file_at(output)
    if not name.endswith(SUFFIX):
        raise UserError(f"--output {output}: the name of the file ends with {SUFFIX}")
    if store.size(name) is not None:
        raise UserError(f"{output} is there already; remove it, or give another --output")
    backbone, tool, comparison = import_backbone(place, preprocessing, stem, partial)
    store.write(name, backbone.to_bytes())
    head = f"{place}: {tool}, {backbone.name} with the stem {backbone.stem}"
    return "\n".join([head, *comparison.lines(), f"written to {output}: moco_ray.load_backbone({output!r})"])


def read_file(place: str) -> bytes:
    """The content of the file at a path or URI. Raises UserError if there is none."""
    store, name = file_at(place)
    if store.size(name) is None:
        raise UserError(f"there is no file {place}; name a checkpoint of another trainer")
    return store.read(name)


def opened(content: bytes, place: str) -> Any:
    """What torch.save or safetensors wrote. Raises UserError for damage, and for objects that are more than data."""
    if place.partition("?")[0].endswith(SUFFIX):
        try:
            tensors, own = tensors_of_bytes(content), own_header(content)
        except (SafetensorError, ValueError) as error:
            raise UserError(f"{place} is no whole .safetensors file ({one_line(error)}); fetch it again") from error
        if own is not None:
            raise UserError(f"{place} is a backbone of moco_ray already: moco_ray.load_backbone and `moco-ray export` take it as it is")
        return tensors
    try:
        with torch.serialization.safe_globals(HARMLESS):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({named[1]})" if named else ""
        raise UserError(
            f"{place} holds code or objects that are no tensors{what}, which were not executed; save its state_dict alone with the tool "
            "that wrote it, or find out who wrote it"
        ) from error
    except (RuntimeError, ValueError, LookupError, EOFError, AttributeError, TypeError, OSError, AssertionError, struct.error) as error:
        raise UserError(f"{place} cannot be read as a checkpoint ({one_line(error)}); fetch it again") from error


def _recognised(held: Any, place: str) -> Recognised:
    """Raises UserError if no layout fits."""
    for layout in LAYOUTS:
        for container in layout.containers:
            inside = held
            for key in container:
                inside = inside.get(key) if isinstance(inside, Mapping) else None
            if not isinstance(inside, Mapping):
                continue
            tensors = {key: value for key, value in inside.items() if isinstance(key, str) and isinstance(value, Tensor)}
            ours, others = _parted(tensors, layout)
            marked = not layout.marks or any(key.startswith(layout.marks) for key in tensors)
            if marked and {"conv1.weight", "layer1.0.conv1.weight"} & ours.keys():
                about = {key: held[key] for key in ("epoch", "arch") if isinstance(held.get(key), int | str)}
                _refuse_two(layout, others, place)
                return Recognised(layout.tool, ours, others, about)
    inside = held
    while isinstance(inside, Mapping) and (deeper := next((inside[key] for key in ("state_dict", "model") if isinstance(inside.get(key), Mapping)), None)):
        inside = deeper
    keys = _some([str(key) for key in inside]) if isinstance(inside, Mapping) else type(held).__name__
    raise UserError(
        f"{place} is in no layout that this release knows ({', '.join(dict.fromkeys(one.tool for one in LAYOUTS))}); it holds {keys}. Rename its "
        "tensors to torchvision's names"
    )


def _refuse_two(layout: Layout, others: list[str], place: str) -> None:
    """Raise UserError if another network lies beside one that is called `backbone`, and it is not known to be the slow one."""
    if layout.prefix != "backbone.":
        return
    beside = {match[1] for key in others if (match := re.match(r"([^.]*backbone[^.]*\.)(?:0|conv1)\.weight$", key))}
    if strange := sorted(beside - {"momentum_backbone.", "backbone_momentum.", "teacher_backbone."}):
        raise UserError(
            f"{place} holds two networks, {layout.prefix} and {strange[0]}, and which of them learned by gradient is not known; save its "
            "state_dict alone, under torchvision's names"
        )


def _parted(tensors: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], list[str]]:
    """What the layout calls the backbone, under torchvision's names; and the names of all else."""
    ours = {layout.rename(key.removeprefix(layout.prefix)): key for key in tensors if key.startswith(layout.prefix)}
    ours = {name: key for name, key in ours.items() if not name.startswith(HEADS)}
    named = set(ours.values())
    return {name: tensors[key] for name, key in ours.items()}, [key for key in tensors if key not in named]


def _architecture(theirs: Mapping[str, Tensor], place: str) -> str:
    """By the kind of its blocks and their numbers. Raises UserError for a network that is none of ours."""
    block = "Bottleneck" if any(".conv3." in key for key in theirs) else "BasicBlock"
    places = [match.groups() for key in theirs if (match := re.match(r"layer([1-4])\.(\d+)\.", key))]
    depths = tuple(1 + max((int(number) for stage, number in places if int(stage) == n), default=-1) for n in (1, 2, 3, 4))
    for name, (kind, numbers) in BACKBONES.items():
        if kind == block and numbers == depths:
            return name
    raise UserError(f"{place} holds a ResNet of {block} blocks {depths}; this release has {', '.join(BACKBONES)}")


def _stem(found: Recognised, asked: str | None, place: str) -> str:
    theirs = found.tensors
    size = tuple(theirs["conv1.weight"].shape[2:]) if "conv1.weight" in theirs else None
    if size == (3, 3) and found.tool == SOLO_LEARN:
        raise UserError(f"{place} begins with solo-learn's 3x3 convolution, which pads by 2: this release has no such stem")
    if size == (3, 3) and asked in (None, "imagenet"):
        raise UserError(
            f"{place} begins with a 3x3 convolution, whose stride no file tells; give --stem small_stride1 or --stem small_stride2 (both pad by "
            "1, and have no pooling)"
        )
    if size == (7, 7) and asked not in (None, "imagenet"):
        raise UserError(f"{place} begins with a 7x7 convolution, and --stem {asked} with one of 3x3; leave --stem away")
    return asked or "imagenet"


def _compare(found: Recognised, own: Mapping[str, Tensor]) -> Comparison:
    theirs = found.tensors
    without_counters = not any(COUNTER in key for key in theirs)
    return Comparison(
        matched=[key for key in own if key in theirs and theirs[key].shape == own[key].shape],
        missing=[key for key in own if key not in theirs and not (without_counters and COUNTER in key)],
        unexpected=[key for key in theirs if key not in own],
        other_shape=[key for key in own if key in theirs and theirs[key].shape != own[key].shape],
        left_out=found.others,
        without_counters=without_counters,
    )


def _plain(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like.dtype).contiguous().clone()  # tensors of a file may share memory


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
