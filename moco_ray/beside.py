"""One checkpoint evaluated beside the training, as a Ray task: features by Ray Data's actors, then kNN.

Responsible for reading the checkpoint, for the actors that run its backbone over the cluster, and for the scalars that come of it.
It reads the checkpoint's file alone, so no queue, key encoder or optimizer can change. Not responsible for when, nor for how long
(evaluations.py), nor for the vote (evaluate/knn.py).
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray
import ray.data
import torch

from moco_ray import checkpoint
from moco_ray.backbone import Backbone, read_saved
from moco_ray.data.on_ray import pipeline_name
from moco_ray.data.stream import Columns, labelled_rows
from moco_ray.errors import UserError
from moco_ray.evaluate.features import BATCH_ROWS, Described, LabelledSet, blamed_on, description
from moco_ray.evaluate.knn import knn_accuracy
from moco_ray.method.encoder import build_encoder
from moco_ray.recipe import Augment, Recipe
from moco_ray.run_folder import RunFolder
from moco_ray.saver import let_others_go_first
from moco_ray.session import Helpers

# Of a CPU, that each process of an evaluation claims: of the tenth that training's data tasks leave (stream.tasks_of_a_rank), so that
# neither the workers nor an elastic run that takes all it can get keeps an evaluation from starting.
CLAIM_CPUS = 0.01


def evaluate_checkpoint(
    run: str, name: str, sets: tuple[LabelledSet, LabelledSet], helpers: Helpers, baseline: bool = False
) -> dict[str, float]:
    """{"knn_top1": share of queries, "knn_left_out": images that could not be read, "evaluation_seconds"} of `name`, checkpoints/step-N.aM.

    With `baseline` also "knn_untrained", of the same network as drawn from the run's seed, which takes as long again. Raises UserError if it is gone or damaged, or if an image set cannot be read. Called in a Ray task.
    """
    began = time.monotonic()
    let_others_go_first()
    folder = RunFolder.existing(run)
    saved = next((one for one in checkpoint.whole(folder.store) if one.name == name), None)
    if saved is None:
        raise UserError(f"{folder.store.place(name)}.pt is gone; somebody removed it, or a later attempt replaced it")
    trained = read_saved(folder, saved)
    recipe, settings = trained.recipe, trained.recipe.evaluation
    backbone = trained.backbone()
    scalars: dict[str, float] = {}
    for scalar, judged in [("knn_top1", backbone), *([("knn_untrained", _untrained(backbone, recipe))] if baseline else [])]:
        bank, queries = describe_sets(sets, judged, recipe, helpers)
        ks, found = (settings.neighbours,), (bank.features["backbone"], bank.labels, queries.features["backbone"], queries.labels)
        scalars[scalar] = knn_accuracy(*found, ks, settings.temperature)[settings.neighbours]
        scalars["knn_left_out"] = bank.left_out + queries.left_out
    return {**scalars, "evaluation_seconds": time.monotonic() - began}


def _untrained(backbone: Backbone, recipe: Recipe) -> Backbone:
    drawn = build_encoder(recipe.encoder, recipe.batch.bn_group_size, recipe.run.seed).backbone.float()
    return replace(backbone, tensors=drawn.state_dict())


def describe_sets(sets: tuple[LabelledSet, ...], backbone: Backbone, recipe: Recipe, helpers: Helpers) -> list[Described]:
    """Features ("backbone": M,D float32), labels and the number of unreadable rows of each set, in the order of its rows.

    One pipeline for all sets: Ray Data tasks read and decode, `helpers.count` of its actors run the backbone in float32.
    """
    work = [
        {"set": number, "first": first} for number, one in enumerate(sets) for first in range(0, len(one.rows), BATCH_ROWS)
    ]
    shared = ray.put((sets, recipe))
    parallel = min(len(work), 2 * helpers.count)
    images = ray.data.from_items(work, override_num_blocks=len(work)).map_batches(
        partial(_read, shared),
        batch_size=None,
        num_cpus=CLAIM_CPUS,
        compute=ray.data.TaskPoolStrategy(size=parallel),
        **helpers.options,
    )
    actors = ray.data.ActorPoolStrategy(size=min(helpers.count, len(work)))
    where = {"num_gpus": 1} if helpers.on_gpus else helpers.options
    features = images.map_batches(
        _Describer, fn_constructor_args=(ray.put(backbone), recipe.augment), batch_size=BATCH_ROWS, num_cpus=CLAIM_CPUS, compute=actors, **where
    )
    features.set_name(pipeline_name())
    context = features.context
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    parts: list[list[Columns]] = [[] for _ in sets]
    for columns in features.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=1):
        for number in np.unique(columns["set"]).tolist():
            own = columns["set"] == number
            parts[number].append({name: values[own].copy() for name, values in columns.items()})
    return [_joined(one, blocks) for one, blocks in zip(sets, parts, strict=True)]


def _read(shared: ray.ObjectRef, block: dict[str, Any]) -> Iterator[Columns]:
    sets, recipe = ray.get(shared)
    for number, first in zip(block["set"].tolist(), block["first"].tolist(), strict=True):
        one: LabelledSet = sets[number]
        with blamed_on(one.called):
            columns = labelled_rows(one.manifest, recipe, one.rows, np.arange(first, min(first + BATCH_ROWS, len(one.rows))))
        good = columns["bad"] == ""
        yield {"crops": columns["crops"], "label": columns["label"], "good": good, "set": np.full(len(good), number)}


class _Describer:
    """One actor."""

    def __init__(self, held: ray.ObjectRef, augment: Augment):
        let_others_go_first()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        backbone: Backbone = ray.get(held)
        self._describe = description(backbone.module(), augment, device)

    def __call__(self, block: Columns) -> Iterator[Columns]:  # one; of what is no generator Ray Data loses the cause of an error
        let_others_go_first()  # of threads: this need not be the one of __init__
        crops = torch.from_numpy(np.array(block.pop("crops")))
        yield {**block, "features": self._describe(crops).float().cpu().numpy()}


def _joined(one: LabelledSet, blocks: list[Columns]) -> Described:
    good = np.concatenate([block["good"] for block in blocks])
    if not good.any():
        with blamed_on(one.called):
            raise UserError(f"no image of {one.manifest.root} could be read")
    features, labels = (torch.from_numpy(np.concatenate([block[name] for block in blocks])[good]) for name in ("features", "label"))
    return Described({"backbone": features}, labels.long(), int((~good).sum()))
