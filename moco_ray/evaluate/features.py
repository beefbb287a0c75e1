"""Features of the query backbone on labelled sets, and the kNN accuracy that is watched while training.

Responsible for the labelled sets, for running the backbone over them (spread over the ranks) and for putting
the result together. It never touches queue or key encoder. Not responsible for the vote (knn.py) nor for
reading and cropping images (data/stream.py).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moco_ray.data.augment import normalise
from moco_ray.data.shards import Manifest, read_chunk_rows
from moco_ray.data.stream import labelled_images
from moco_ray.data.survey import Spread, build_manifest
from moco_ray.errors import UserError
from moco_ray.evaluate.knn import knn_predict
from moco_ray.method.encoder import Encoder, autocast, working_dtype
from moco_ray.ranks import Ranks
from moco_ray.recipe import Augment, Recipe

BATCH_ROWS = 256
_TAG = 0xE5  # keeps the choice of rows apart from other draws of the seed

Describe = Callable[[Tensor], Tensor]  # uint8 crops N,P,P,3 -> N,D features


@dataclass(frozen=True, eq=False)
class LabelledSet:
    """Some rows of a labelled data set."""

    manifest: Manifest
    rows: np.ndarray  # M int64, rising
    called: str = ""  # what its user named it by: a recipe's key, or an option

    @classmethod
    def read(cls, uri: str, wanted: int, recipe: Recipe, spread: Spread | None = None, called: str = "") -> "LabelledSet":
        """All rows of the set, or `wanted` of them drawn from the seed. Raises UserError if it cannot be read."""
        with blamed_on(called):
            manifest = build_manifest(uri, recipe.data.image_column, spread)
            read_chunk_rows(manifest, 0, np.zeros(1, np.int64), recipe.evaluation.label_column)  # raises if there are none
        rows = np.arange(manifest.rows)
        if 0 < wanted < manifest.rows:
            rows = np.sort(np.random.default_rng([_TAG, recipe.run.seed]).choice(manifest.rows, wanted, replace=False))
        return cls(manifest, rows, called)


@contextlib.contextmanager
def blamed_on(called: str) -> Iterator[None]:
    """A UserError from inside names the set that it is of."""
    try:
        yield
    except UserError as error:
        if not called or str(error).startswith(called):
            raise
        raise type(error)(f"{called}: {error}") from error


def labelled_sets(
    recipe: Recipe, all_rows: bool = False, spread: Spread | None = None, called: tuple[str, str] = ("evaluation.bank_uri", "evaluation.query_uri")
) -> tuple[LabelledSet, LabelledSet]:
    """Bank and queries of `recipe.evaluation`, which errors call `called`. Raises UserError if one cannot be read, if k is larger than the
    bank or if classes differ.
    """
    settings = recipe.evaluation
    bank = LabelledSet.read(settings.bank_uri, 0 if all_rows else settings.bank_rows, recipe, spread, called[0])
    queries = LabelledSet.read(settings.query_uri, 0 if all_rows else settings.query_rows, recipe, spread, called[1])
    if settings.neighbours > len(bank.rows):
        raise UserError(
            f"evaluation.neighbours {settings.neighbours} is more than the {len(bank.rows)} rows of the bank "
            f"{settings.bank_uri}; lower it or take more rows"
        )
    if bank.manifest.classes != queries.manifest.classes:
        raise UserError(
            f"{settings.bank_uri} and {settings.query_uri} have different class folders, so their labels do not compare; "
            "give both sets the same folders"
        )
    return bank, queries


def backbone_of(encoder: Encoder, recipe: Recipe, device: torch.device) -> Describe:
    """The product of a run as a function: the backbone in evaluation mode, without the projection head."""
    layout = torch.channels_last if recipe.run.memory_format == "channels_last" else torch.contiguous_format

    def describe(crops: Tensor) -> Tensor:
        x = normalise(crops.to(device), recipe.augment, working_dtype(recipe.encoder))
        with torch.no_grad(), autocast(recipe.encoder, device):
            return encoder.backbone(x.contiguous(memory_format=layout)).float()

    return describe


def description(module: nn.Module, augment: Augment, device: torch.device) -> Describe:
    """A backbone as its user loads it: float32, evaluation mode."""
    module = module.eval().to(device, memory_format=torch.channels_last)

    def describe(crops: Tensor) -> Tensor:
        with torch.no_grad():
            return module(normalise(crops.to(device), augment))

    return describe


def raw_pixels(crops: Tensor) -> Tensor:
    """The baseline that needs no network: N,D float32 in 0..1; one channel where all three are equal (grey)."""
    grey = bool((crops[..., 0] == crops[..., 1]).all() and (crops[..., 0] == crops[..., 2]).all())
    return (crops[..., :1] if grey else crops).flatten(1).float() / 255


def colour_histogram(crops: Tensor) -> Tensor:
    """The baseline of colours alone: N,512 float32, the square roots of the shares of 8 x 8 x 8 colours (N,P,P,3 uint8)."""
    levels = (crops >> 5).long()  # 256 values in 8 levels
    bins = (levels[..., 0] * 64 + levels[..., 1] * 8 + levels[..., 2]).flatten(1)  # N,P*P
    counts = torch.zeros(len(crops), 512, device=crops.device).scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.float32))
    return (counts / bins.shape[1]).sqrt()


class Described(NamedTuple):
    """A labelled set under some descriptions."""

    features: dict[str, Tensor]  # M,D each
    labels: Tensor  # M int64
    left_out: int  # images that could not be decoded


def describe_set(
    labelled: LabelledSet, descriptions: dict[str, Describe], recipe: Recipe, ranks: Ranks, told: Callable[[int, int], None] = lambda done, total: None
) -> Described:
    """All ranks' rows in order, on every rank; each rank reads and describes its own share. Collective.

    `told`: how many rows of this rank's share are done, of how many.
    """
    share = np.array_split(labelled.rows, ranks.world)[ranks.rank]
    parts: dict[str, list[Tensor]] = {name: [] for name in descriptions}
    labels, left_out, done = [torch.zeros(0, dtype=torch.int64)], 0, 0
    told(0, len(share))
    with blamed_on(labelled.called):
        for batch in labelled_images(labelled.manifest, recipe, share, BATCH_ROWS, ranks.world):
            left_out += len(batch.bad)
            labels.append(batch.labels.clone())
            for name, describe in descriptions.items():
                parts[name].append(describe(batch.crops) if len(batch.crops) else None)
            done += len(batch.labels) + len(batch.bad)
            told(done, len(share))
    own = torch.cat(labels).to(ranks.device)
    counts = ranks.gather_objects(len(own))
    if sum(counts) == 0:
        with blamed_on(labelled.called):
            raise UserError(f"no image of {labelled.manifest.root} could be read")
    features = {}
    for name, blocks in parts.items():
        blocks = [block for block in blocks if block is not None]
        width = max(ranks.gather_objects(blocks[0].shape[1] if blocks else 0))
        mine = torch.cat(blocks).to(ranks.device) if blocks else torch.zeros(0, width, device=ranks.device)
        features[name] = ranks.gather(mine, counts)
    return Described(features, ranks.gather(own, counts), sum(ranks.gather_objects(left_out)))


def watch_knn(
    encoder: Encoder, sets: tuple[LabelledSet, LabelledSet], recipe: Recipe, ranks: Ranks
) -> dict[str, float]:
    """{"knn_top1": share of queries whose class the k nearest backbone features name, "knn_left_out": images that
    could not be read}. Collective.

    The encoder is in evaluation mode meanwhile, and in training mode again afterwards.
    """
    encoder.eval()
    try:
        describe = {"backbone": backbone_of(encoder, recipe, ranks.device)}
        bank = describe_set(sets[0], describe, recipe, ranks)
        queries = describe_set(sets[1], describe, recipe, ranks)
    finally:
        encoder.train()
    own = np.array_split(np.arange(len(queries.labels)), ranks.world)[ranks.rank]
    mine, settings = queries.features["backbone"][own], recipe.evaluation
    predicted = knn_predict(bank.features["backbone"], bank.labels, mine, [settings.neighbours], settings.temperature)[
        0
    ]
    right = ranks.sum((predicted == queries.labels[own]).sum().double()[None])
    return {"knn_top1": float(right) / len(queries.labels), "knn_left_out": bank.left_out + queries.left_out}
