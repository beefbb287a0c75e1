"""A run that begins from given weights: both encoders have them, everything else is as in a run that draws its own."""

import pytest
import torch

from moco_ray.backbone import Backbone, Preprocessing
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.learner import Learner
from moco_ray.method.encoder import build_backbone
from moco_ray.recipe import Recipe
from moco_ray.run_folder import RunFolder
from moco_ray.warm_start import FILE, begun_from, keep, warm_start
from tests.synthetic import identical, recipe


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(5)
    module = build_backbone("resnet10", "small_stride2")
    module.bn1.running_mean.normal_()
    return Backbone("resnet10", "small_stride2", module.state_dict(), Preprocessing(18, 16, (0.5,) * 3, (0.2,) * 3), {"run": "other"})


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_both_encoders_begin_from_the_weights_and_head_queue_and_optimizer_as_always(backbone, tmp_path, precision):
    folder, own = RunFolder(Store(str(tmp_path))), begun_from(recipe(encoder={"precision": precision}), backbone)
    keep(folder, backbone)
    learner, drawn = Learner.new(own), Learner.new(own)
    warm_start(learner, folder, own)
    for encoder in (learner.f_q, learner.f_k):
        held = encoder.backbone.state_dict()
        assert held.keys() == backbone.tensors.keys()
        assert all(torch.equal(held[name].float(), tensor.float()) for name, tensor in backbone.tensors.items())
        assert identical(encoder.head.state_dict(), drawn.f_q.head.state_dict())
    assert not torch.equal(learner.f_q.backbone.conv1.weight, drawn.f_q.backbone.conv1.weight)
    assert identical(learner.queue.state_dict(), drawn.queue.state_dict()) and learner.step == 0
    assert identical(learner.optimizer.state_dict(), drawn.optimizer.state_dict())
    assert all(p.data_ptr() != q.data_ptr() for p, q in zip(learner.f_q.parameters(), learner.f_k.parameters(), strict=True))


def test_the_recipe_knows_the_weights_and_not_the_file(backbone):
    plain = recipe()
    own = begun_from(plain, backbone)
    again = Backbone.of_bytes(backbone.to_bytes(), "a file")
    assert own.fingerprint() != plain.fingerprint() and begun_from(plain, again).fingerprint() == own.fingerprint()
    assert Recipe.of_text(own.toml(), "recipe.toml").fingerprint() == own.fingerprint()
    again.tensors["conv1.weight"][0, 0, 0, 0] += 1e-3
    assert begun_from(plain, again).fingerprint() != own.fingerprint()
    assert own.differences(plain)[0].startswith("encoder.warm_start: ")


def test_recipes_without_a_warm_start_keep_the_fingerprint_of_earlier_releases():
    assert Recipe.read("jobs/demo.toml").fingerprint() == "8766fa0b6dd3fb47"
    assert Recipe.read("jobs/moco_v2_imagenet.toml").fingerprint() == "fdae5086664cfc4d"


def test_weights_of_another_network_another_file_and_a_fingerprint_by_hand_are_refused(backbone, tmp_path):
    with pytest.raises(UserError, match="of a resnet10 with stem small_stride2, and the recipe has a resnet18 .*give encoder.backbone=resnet10"):
        begun_from(recipe(encoder={"backbone": "resnet18"}), backbone)
    with pytest.raises(UserError, match="filled in by --warm-start"):
        begun_from(recipe(encoder={"warm_start": "0123456789abcdef"}), None)
    folder, own = RunFolder(Store(str(tmp_path))), begun_from(recipe(), backbone)
    backbone.tensors["bn1.weight"][0] = 7.0
    keep(folder, backbone)
    with pytest.raises(UserError, match=f"{FILE} is not what the run began with"):
        warm_start(Learner.new(own), folder, own)
