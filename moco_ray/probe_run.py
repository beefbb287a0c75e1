"""`moco-ray evaluate --protocol linear|sweep|finetune`: a backbone judged by training on labels.

Responsible for the sets, the checks before anything is started, and the files of the result. Not responsible for training
(evaluate/probe.py, evaluate/sweep.py) nor for the table of the default protocol (evaluate_run.py).
"""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from moco_ray.backbone import Backbone
from moco_ray.board import start_board
from moco_ray.data.labels import read_labels
from moco_ray.data.storage import Store
from moco_ray.data.subset import Subset, share_of_each_class
from moco_ray.errors import UserError
from moco_ray.evaluate import protocols
from moco_ray.evaluate.confusion import confusion_picture
from moco_ray.evaluate.features import LabelledSet, blamed_on, description, labelled_sets
from moco_ray.evaluate.protocols import Choices, Protocol
from moco_ray.evaluate.report import Result, about, as_json, as_markdown, as_text, per_cent
from moco_ray.evaluate.sweep import MOMENTUM, RATES, Settings, Swept, sweep
from moco_ray.evaluate_run import described, opened, sets_called
from moco_ray.launch_probe import carry_probe
from moco_ray.probe_worker import Kept, ProbeJob
from moco_ray.recipe import Recipe
from moco_ray.run_folder import code_version
from moco_ray.session import lazily_spread, ray_session
from moco_ray.stages import Stages


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    kind: str  # linear, sweep, finetune
    place: str  # a run, a checkpoint, or a backbone's .safetensors
    training_uri: str | None
    test_uri: str | None
    output: str | None
    choices: Choices
    workers: int = 1
    label_percent: int = 100
    debug: bool = False


class _Case(NamedTuple):
    """What is judged, on what."""

    backbone: Backbone
    recipe: Recipe  # the backbone's own, with its view of images and the labelled sets
    store: Store
    sets: tuple[LabelledSet, LabelledSet]
    labels: np.ndarray  # of the training set's rows
    classes: int


def probe_run(request: Request) -> str:
    """Train, write NAME.json, NAME.md and confusion-NAME.png, and return a short table. NAME is linear, sweep or finetune-PERCENT.

    They lie in the output folder, by default the run's. Raises UserError for all that a user can cure.
    """
    if request.workers < 1:
        raise UserError(f"--workers {request.workers}: at least one worker is needed")
    backbone, recipe, store = _read(request)
    called = sets_called(request.training_uri, request.test_uri)
    with lazily_spread(request.workers, request.debug) as spread:
        case = _case(backbone, recipe, store, labelled_sets(recipe, all_rows=True, spread=spread, called=called))
        for warning in case.sets[0].manifest.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        result, kept = (_sweep(case, request), None) if request.kind == "sweep" else _train(case, request)
    name = result.protocol["name"]
    title = f"{name}, last epoch, top-1 {per_cent(result.last['top1'])} %"
    store.write(f"confusion-{name}.png", confusion_picture(result.last["confusion"], case.sets[0].manifest.classes, title))
    store.write(f"{name}.json", json.dumps(as_json(result), indent=1).encode())
    store.write(f"{name}.md", f"{as_markdown(result)}\n\n{about(result)}\n".encode())
    if kept:  # from here on nothing needs it
        kept.remove()
    return f"{as_text(result)}\nresult: {store.place(f'{name}.json')}"


def _read(request: Request) -> tuple[Backbone, Recipe, Store]:
    sets = (("bank_uri", request.training_uri), ("query_uri", request.test_uri))
    overrides = [f"evaluation.{key}={uri}" for key, uri in sets if uri]
    backbone, recipe, store = opened(request.place, [*overrides, "evaluation.neighbours=1"], request.output)
    if not recipe.evaluation.bank_uri:
        raise UserError("no labelled sets: give --bank FOLDER to train on and --queries FOLDER to test on")
    if store is None:
        raise UserError(f"{request.place} has no run folder for the result; give --output FOLDER")
    seen = backbone.preprocessing
    augment = recipe.augment.model_copy(update={"image_pixels": seen.image_pixels, "mean": seen.mean, "std": seen.std})
    evaluation = recipe.evaluation.model_copy(update={"resize_pixels": seen.resize_pixels})
    return backbone, recipe.model_copy(update={"augment": augment, "evaluation": evaluation}), store


def _case(backbone: Backbone, recipe: Recipe, store: Store, sets: tuple[LabelledSet, LabelledSet]) -> _Case:
    """Read the labels, and refuse sets that cannot be a training and a test set."""
    training, test = sets
    if training.manifest.fingerprint == test.manifest.fingerprint:
        raise UserError(f"{training.manifest.root} would be trained on and tested on; give --queries another set than --bank")
    with Stages(sys.stderr) as at:
        at("reading labels")
        labels, test_labels = (_labels(one, recipe) for one in sets)
    if min(labels.min(), test_labels.min()) < 0:
        raise UserError("labels must be 0 or more; number the classes from 0 on")
    if len(np.unique(labels)) < 2:
        raise UserError("the training rows are all of one class: there is nothing to tell apart; give --bank a set with several")
    if len(strange := np.setdiff1d(test_labels, labels)):
        raise UserError(f"the test rows have class {strange[0]}, which no training row has; give both sets the same classes")
    return _Case(backbone, recipe, store, sets, labels, int(labels.max()) + 1)


def _labels(labelled: LabelledSet, recipe: Recipe) -> np.ndarray:
    with blamed_on(labelled.called):
        return read_labels(labelled.manifest, recipe.evaluation.label_column)


def _train(case: _Case, request: Request) -> tuple[Result, Kept]:
    if request.kind == "linear":
        protocol = protocols.linear(case.recipe, request.choices)
    else:
        protocol = protocols.finetune(case.recipe, request.choices, request.label_percent)
    whole = protocol.label_percent == 100
    subset = None if whole else share_of_each_class(case.labels, protocol.label_percent, protocol.recipe.run.seed)
    rows = len(case.labels) if subset is None else len(subset.rows)
    _refuse_batch(protocol, rows, request.workers)
    kept = Kept(case.store.uri, _decides(case, protocol, subset))
    with ray_session(request.workers, request.debug) as room:
        state = carry_probe(_job(case, protocol, subset, kept), request.workers, room, request.debug)
    facts = {
        **_facts(case, state["last"], rows),
        "training_rows_replaced": state["replaced"],
        "rows_dropped_each_epoch": rows % protocol.recipe.batch.global_batch_size,
        "subset_fingerprint": subset.fingerprint if subset else None,
        "workers": request.workers,
    }
    return Result(protocol.facts(), state["last"], state["epoch"], state["best"], state["best_epoch"], state["history"], facts), kept


def _job(case: _Case, protocol: Protocol, subset: Subset | None, kept: Kept) -> ProbeJob:
    return ProbeJob(
        protocol=protocol, backbone=case.backbone.to_bytes(), training=case.sets[0], test=case.sets[1], labels=case.labels,
        classes=case.classes, subset=subset, kept=kept, board=start_board(1),
    )  # fmt: skip


def _refuse_batch(protocol: Protocol, rows: int, workers: int) -> None:
    batch = protocol.recipe.batch
    if batch.global_batch_size > rows:
        raise UserError(f"--batch-size {batch.global_batch_size} is larger than the {rows} labelled training rows; make it smaller, or give more rows")
    if workers > batch.groups:
        raise UserError(
            f"--workers {workers}: a batch of {batch.global_batch_size} is dealt out in {batch.groups} groups of {batch.bn_group_size} rows; "
            f"use at most {batch.groups} workers"
        )


def _decides(case: _Case, protocol: Protocol, subset: Subset | None) -> dict[str, Any]:
    """All that decides the result, by which an interrupted training finds its own state."""
    evaluation = protocol.recipe.evaluation
    return {
        "protocol": protocol.name,
        "recipe": protocol.recipe.fingerprint(),
        "head_factor": protocol.head_factor,
        "view": [evaluation.resize_pixels, evaluation.label_column],
        "backbone": {key: str(value) for key, value in case.backbone.origin.items()},
        "sets": [one.manifest.fingerprint for one in case.sets],
        "subset": subset.fingerprint if subset else None,
        "classes": case.classes,
    }


def _sweep(case: _Case, request: Request) -> Result:
    choices, rates = request.choices, RATES if request.choices.learning_rate is None else (request.choices.learning_rate,)
    protocol = protocols.linear(case.recipe, choices)  # checks the choices, and has the view of an image
    settings = Settings(rates, protocol.recipe.schedule.epochs, protocol.recipe.batch.global_batch_size, choices.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    describe = {"backbone": description(case.backbone.module(), protocol.recipe.augment, device)}
    with Stages(sys.stderr) as at:
        at("starting Ray")
        with ray_session(1, request.debug):
            bank, queries = described(case.sets, describe, protocol.recipe, at)
        x, test_x = bank.features["backbone"], queries.features["backbone"]
        swept = sweep(x, bank.labels, test_x, queries.labels, settings, lambda done, total: at("classifiers", done, total, "epochs"))
    facts = _facts(case, asdict(swept.last), len(bank.labels)) | {"training_rows_left_out": bank.left_out}
    last, best = asdict(swept.last), asdict(swept.best)
    return Result(_sweep_facts(protocol, settings, swept), last, settings.epochs, best, swept.best_epoch, swept.history, facts)


def _sweep_facts(protocol: Protocol, settings: Settings, swept: Swept) -> dict[str, Any]:
    held = protocol.facts()
    kept = ("epochs", "global_batch_size", "schedule", "milestone_epochs", "test_view", "backbone", "label_percent", "seed")
    recipe = {"sgd_momentum": MOMENTUM, "weight_decay": 0.0, "rates": list(settings.rates), **{key: held[key] for key in kept}}
    return {
        "name": "sweep",
        "source": "SGD as in the linear protocol, on cached features of centre crops, for several rates at once; not the published protocol",
        **recipe,
        "training_view": held["test_view"],
        "recipe_fingerprint": hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16],
        "held_out_top1": {f"{rate:g}": share for rate, share in swept.held_out.items()},
        "chosen_rate": swept.rate,
        "chosen_at_the_edge": len(settings.rates) > 1 and swept.rate in (settings.rates[0], settings.rates[-1]),
    }


def _facts(case: _Case, last: dict[str, Any], labels_used: int) -> dict[str, Any]:
    backbone, sets = case.backbone, zip(("training", "test"), case.sets, strict=True)
    return {
        "backbone": {"name": backbone.name, "stem": backbone.stem, **backbone.origin},
        "sets": {name: {"uri": one.manifest.root, "fingerprint": one.manifest.fingerprint, "rows": len(one.rows)} for name, one in sets},
        "labels_used": labels_used,
        "test_rows_left_out": len(case.sets[1].rows) - sum(map(sum, last["confusion"])),
        "code": code_version(),
    }
