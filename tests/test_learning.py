"""Does it learn? The generated set: grey prototypes under the very nuisances that the augmentation removes.

1-NN from 10 labels per class on features of the backbone, beside raw pixels and the untrained encoder in the same
run. It proves that the machinery learns (data path, loss, queue, momentum), not that features suit natural images.
"""

import functools
import statistics

import numpy as np
import pytest
import torch

from moco_ray.data.batch import Batch
from moco_ray.data.decode import centre_crop, decode
from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.data.segment import Segments, Source, segment_steps
from moco_ray.data.shards import read_chunk_rows
from moco_ray.data.survey import build_manifest
from moco_ray.evaluate.features import backbone_of, raw_pixels
from moco_ray.evaluate.knn import few_labels
from moco_ray.learner import Learner
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.train import Outputs, train

STEPS = 250
# Trained features of seeds 0 to 4: 0.459, 0.429, 0.438, 0.454, 0.445 on an Intel CPU and 0.428, 0.431, 0.452, 0.457, 0.422 on an AMD (together 0.442,
# standard deviation 0.013), in bfloat16 0.433, 0.440, 0.432, 0.462, 0.425 (0.439), beside raw pixels 0.372 and untrained 0.325 to 0.374; chance is 0.05.
# The margin lies 3 deviations below the mean gain over raw.
# Rate and temperature were chosen on seed 0, for at the first ones (0.06, 0.2) the gain was smaller.
MARGIN = 0.03
VALUES = {
    "encoder": {"backbone": "resnet10", "stem": "imagenet", "feature_dim": 64},
    "contrast": {"temperature": 0.1, "queue_keys": 1024, "key_momentum": 0.99},
    "batch": {"global_batch_size": 64, "bn_group_size": 8},
    "optimizer": {"learning_rate": 0.03},
    "schedule": {"steps": STEPS, "warmup_steps": 20},
    "augment": {
        "image_pixels": 32, "crop_scale": [0.4, 1.0], "jitter": [0.4, 0.4, 0.0, 0.0], "grayscale_probability": 0.0,
        "blur_probability": 0.0, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("drawn")
    drawn_prototypes(target, rows=8000, test_rows=1000)
    return target


@functools.cache
def learn(folder, seed: int, precision: str = "float32") -> dict[str, float]:
    """Pre-train on the training images; accuracy of each description of the test images."""
    torch.set_num_threads(2)
    recipe = Recipe.parse({**VALUES, "encoder": {**VALUES["encoder"], "precision": precision}, "run": {"seed": seed, "checkpoint_every_steps": 10_000}})
    manifest = build_manifest(str(folder / "train"), "image")
    plan, learner = Plan(recipe, manifest.rows), Learner.new(recipe)
    untrained = Learner.new(recipe)
    outputs = Outputs(lambda entry, bad: None, lambda learner: None, lambda learner: {})
    train(learner, rows_without_ray(Source(manifest, recipe, plan)), plan, Ranks(), outputs)
    bank, bank_labels = labelled(folder / "train", 4000)
    queries, labels = labelled(folder / "test", 1000)
    describe = {
        "raw": raw_pixels,
        "untrained": backbone_of(untrained.f_q.eval(), recipe, torch.device("cpu")),
        "trained": backbone_of(learner.f_q.eval(), recipe, torch.device("cpu")),
    }
    return {name: few_labels(f(bank), bank_labels, f(queries), labels)[0] for name, f in describe.items()}


def rows_without_ray(source: Source):
    """The same tasks that Ray would carry, one after another in this process."""
    segments = Segments(source.plan, 1, 0, 0)
    for index in range(len(segments)):
        for columns in segment_steps(source, segments.groups, segments[index]):
            crops, positions, rows = (torch.from_numpy(columns[name]) for name in ("crops", "position", "row"))
            yield Batch(segments[index].epoch, crops, positions, rows)


def labelled(folder, count: int):
    manifest = build_manifest(str(folder), "image")
    crops, labels = [], []
    for chunk in range(len(manifest.chunk_rows)):
        found = read_chunk_rows(manifest, chunk, np.arange(manifest.chunk_rows[chunk]), "label")
        crops += [centre_crop(decode(encoded, 10**6), 32, 32) for encoded in found.encoded]
        labels.append(found.labels)
    return torch.from_numpy(np.stack(crops[:count])), torch.from_numpy(np.concatenate(labels)[:count])


def test_ten_labels_tell_the_classes_better_from_trained_features_than_from_pixels_or_an_untrained_encoder(folder):
    got = learn(folder, seed=0)
    assert got["trained"] > max(got["raw"], got["untrained"]) + MARGIN, got


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_other_seeds_learn_too(folder, seed):
    got = learn(folder, seed)
    print(seed, got)
    assert got["trained"] > max(got["raw"], got["untrained"]) + MARGIN, got


@pytest.mark.slow
def test_over_the_seeds_bfloat16_is_within_one_standard_deviation_of_float32(folder):
    runs = [learn(folder, seed, "bfloat16") for seed in range(5)]
    assert all(got["trained"] > max(got["raw"], got["untrained"]) + MARGIN for got in runs), runs
    exact, reduced = [learn(folder, seed)["trained"] for seed in range(5)], [got["trained"] for got in runs]
    print(exact, reduced, statistics.stdev(exact))
    assert exact != reduced  # it did compute something else
    assert abs(statistics.mean(reduced) - statistics.mean(exact)) < statistics.stdev(exact), (exact, reduced)
