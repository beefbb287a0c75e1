"""`moco-ray evaluate`: a trained backbone beside raw pixels, colours and an untrained one, judged alike.

Responsible for the sets, the descriptions and where the result goes. Not responsible for the judges (evaluate/).
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from moco_ray.backbone import SUFFIX, Backbone, Trained, read_backbone, read_checkpoint
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.evaluate.confusion import confusion_picture
from moco_ray.evaluate.features import (
    Describe,
    Described,
    LabelledSet,
    colour_histogram,
    describe_set,
    description,
    labelled_sets,
    raw_pixels,
)
from moco_ray.evaluate.linear import L2_GRID
from moco_ray.evaluate.table import DRAWS, TEMPERATURES, Protocol, Row, as_json, as_markdown, as_text, compare
from moco_ray.method.encoder import build_encoder
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.session import lazily_spread, ray_session
from moco_ray.stages import Stages

JUDGES = {
    "knn": "cosine similarity, each of the k nearest votes with exp(similarity / temperature) (Wu et al. 2018)",
    "few_labels": f"the nearest of some labelled rows of each class, mean and standard deviation over {DRAWS} seeded draws",
    "linear": f"multinomial logistic regression to its minimum on standardised features; l2 of {list(L2_GRID)}, chosen on a tenth of the bank",
    "features": "float32, of the evaluation mode, of one centre crop an image",
}


def evaluate_run(
    place: str, bank_uri: str | None, query_uri: str | None, output: str | None = None, linear: bool = True, debug: bool = False
) -> str:
    """The table as text; also evaluation.json, evaluation.md and confusion.png in `output`, by default the run's folder.

    `place` is a run (its newest checkpoint), a checkpoint, or a backbone's .safetensors. Uses all rows of both sets, this
    process's device, and Ray for reading. If the sets are the same, each row is judged by the others, and not linearly.
    Raises UserError if there is no backbone or no labelled sets are named.
    """
    overrides = [f"evaluation.{key}={uri}" for key, uri in (("bank_uri", bank_uri), ("query_uri", query_uri)) if uri]
    backbone, recipe, store = opened(place, [*overrides, "evaluation.neighbours=1"], output)  # the table has its own k
    if not recipe.evaluation.bank_uri:
        raise UserError("no labelled sets: give --bank FOLDER and --queries FOLDER")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    untrained = build_encoder(recipe.encoder, recipe.batch.bn_group_size, recipe.run.seed).backbone
    descriptions = {
        "raw pixels": raw_pixels,
        "colour histogram": colour_histogram,
        "untrained encoder": description(untrained.float(), recipe.augment, device),
        "trained encoder": description(backbone.module(), recipe.augment, device),
    }
    with lazily_spread(1, debug) as spread:
        sets = labelled_sets(recipe, all_rows=True, spread=spread, called=sets_called(bank_uri, query_uri))
        leave_one_out = sets[0].manifest.fingerprint == sets[1].manifest.fingerprint
        with Stages(sys.stderr) as at:
            at("starting Ray")
            with ray_session(1, debug):
                bank, queries = described(sets[:1] if leave_one_out else sets, descriptions, recipe, at)
            protocol = Protocol.fitting(bank.labels, leave_one_out, linear)
            features = {name: (bank.features[name], queries.features[name]) for name in descriptions}
            rows = compare(features, bank.labels, queries.labels, protocol, lambda done, total, now: at("judging", done, total, "results", now))
    about = _about(backbone, bank, queries, protocol)
    if store:
        _write(store, rows, about, backbone, sets, protocol)
    return f"{as_text(rows)}\n({about})"


def sets_called(bank_uri: str | None, query_uri: str | None) -> tuple[str, str]:
    """What errors call the two sets: the option, where one was given, else the recipe's key."""
    return "--bank" if bank_uri else "evaluation.bank_uri", "--queries" if query_uri else "evaluation.query_uri"


def described(sets: Sequence[LabelledSet], descriptions: dict[str, Describe], recipe: Recipe, at: Stages) -> tuple[Described, Described]:
    """Bank and queries (of one set: that for both), by this process on its device. `at` is told how far it is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for labelled, name in zip(sets, ("bank", "queries"), strict=False):
        told = partial(at, f"features of the {name}", unit="images")
        found.append(describe_set(labelled, descriptions, recipe, Ranks(device=device), told))
    return found[0], found[-1]


def opened(place: str, overrides: list[str], output: str | None) -> tuple[Backbone, Recipe, Store | None]:
    """The backbone, the recipe that its evaluation follows, and where the result goes."""
    store = Store.at(output) if output else None
    if not place.partition("?")[0].endswith(SUFFIX):
        trained: Trained = read_checkpoint(place)
        backbone = trained.backbone()  # a run without an evaluation of its own is seen as `Preprocessing` says, not through the default
        view = f"evaluation.resize_pixels={backbone.preprocessing.resize_pixels}"
        return backbone, trained.folder.recipe([view, *overrides]), store or trained.folder.store
    backbone = read_backbone(place)
    seen = backbone.preprocessing
    own = [
        f"encoder.backbone={backbone.name}", f"encoder.stem={backbone.stem}", "schedule.steps=1", f"augment.image_pixels={seen.image_pixels}",
        f"augment.mean={list(seen.mean)}", f"augment.std={list(seen.std)}", f"evaluation.resize_pixels={seen.resize_pixels}",
    ]  # fmt: skip
    return backbone, Recipe.of_overrides([*own, *overrides]), store


def _about(backbone: Backbone, bank: Described, queries: Described, protocol: Protocol) -> str:
    step = f", step {backbone.origin['step']}" if "step" in backbone.origin else ""
    about = f"features of the backbone{step}; {len(queries.labels)} queries, bank of {len(bank.labels)}"
    if protocol.leave_one_out:
        about += "; the sets are the same: each image is judged by the others, and there is no linear classifier"
    left_out = bank.left_out + (0 if protocol.leave_one_out else queries.left_out)
    if left_out:
        about += f"; {left_out} images could not be read and are left out"
    if protocol.neighbours[-1] < 200:
        about += f"; no k above {protocol.neighbours[-1]}, the bank is too small for it"
    return about


def _write(
    store: Store, rows: list[Row], about: str, backbone: Backbone, sets: tuple[LabelledSet, LabelledSet], protocol: Protocol
) -> None:
    settings = {"neighbours": protocol.neighbours, "temperatures": TEMPERATURES, "labels_per_class": protocol.few, "seed": protocol.seed}
    found: dict[str, Any] = {
        "about": about,
        "step": backbone.origin.get("step"),
        "backbone": {"name": backbone.name, "stem": backbone.stem, **backbone.origin},
        "sets": {name: _set_facts(one) for name, one in zip(("bank", "queries"), sets, strict=True)},
        "protocol": {**JUDGES, **settings, "leave_one_out": protocol.leave_one_out},
        "rows": as_json(rows),
        "markdown": as_markdown(rows[-1:]).splitlines()[-1],
    }
    trained = rows[-1].linear
    if trained:
        picture = confusion_picture(trained.confusion, sets[0].manifest.classes, f"linear classifier, top-1 {100 * trained.top1:.1f} %")
        store.write("confusion.png", picture)
    store.write("evaluation.json", json.dumps(found, indent=1).encode())
    store.write("evaluation.md", f"{as_markdown(rows)}\n\n{about}\n".encode())


def _set_facts(labelled: LabelledSet) -> dict[str, Any]:
    manifest = labelled.manifest
    return {"uri": manifest.root, "fingerprint": manifest.fingerprint, "rows": len(labelled.rows)}
