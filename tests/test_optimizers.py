"""The recipe's optimizers: LARS against a slow reading, what decays, what a step that is not finite leaves alone, resuming."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from moco_ray.checks.plan import learning_rate as judged_rate
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.export import export
from moco_ray.learner import Learner
from moco_ray.method.optimizers import LARS, build_optimizer
from moco_ray.plan import Plan, Workers
from moco_ray.ranks import Ranks
from moco_ray.recipe import Optimizer, Recipe
from moco_ray.released import released_state
from moco_ray.show_plan import describe
from tests import synthetic
from tests.test_export import stored

NAMES = ("sgd", "lars", "adamw")


def network(dtype=torch.float64) -> nn.Module:
    """Weights of one to four dimensions; the biases begin at 0 as in ResNets."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5))
    for layer in (net[0], net[3]):
        nn.init.zeros_(layer.bias)
    return net.to(dtype)


def draw_gradients(net: nn.Module, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)
    if step == 3:
        net[1].bias.grad.zero_()


@pytest.mark.parametrize("everywhere", [True, False])
def test_lars_is_what_a_slow_reading_of_algorithm_1_gives(everywhere):
    net = network()
    optimizer = build_optimizer(net, Optimizer(name="lars", learning_rate=1.0, weight_decay=0.05, sgd_momentum=0.8, decay_norm_and_bias=everywhere))
    slow = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
    moving = {name: np.zeros_like(w) for name, w in slow.items()}
    for step in range(20):
        draw_gradients(net, step)
        rate = 2.0 / (step + 1)  # a schedule
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, p in net.named_parameters():
            w, g, decay, trust = slow[name], p.grad.numpy(), 0.05, 1.0
            if w.ndim <= 1 and not everywhere:
                decay = 0.0
            elif np.linalg.norm(w) > 0 and np.linalg.norm(g) + decay * np.linalg.norm(w) > 0:
                trust = 0.001 * math.sqrt((w**2).sum()) / (math.sqrt((g**2).sum()) + decay * math.sqrt((w**2).sum()))
            moving[name] = 0.8 * moving[name] + trust * (g + decay * w)
            slow[name] = w - rate * moving[name]
        optimizer.step()
    for name, p in net.named_parameters():
        assert np.abs(p.detach().numpy() - slow[name]).max() < 1e-12, name


def test_lars_does_not_change_when_all_gradients_of_a_tensor_grow():
    """That is what it is for: λ·g does not depend on the size of g where nothing decays."""
    moved = []
    for factor in (1.0, 1000.0):
        net = network()
        before = net[0].weight.detach().clone()
        draw_gradients(net, 0)
        for p in net.parameters():
            p.grad *= factor
        LARS([{"params": list(net.parameters())}], 1.0, 0.9).step()
        moved.append(net[0].weight.detach() - before)
    assert torch.allclose(*moved, rtol=1e-12)
    assert moved[0].norm() == pytest.approx(0.001 * before.norm().item())


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_norms_and_biases_decay_only_where_the_recipe_says_so(name, everywhere):
    net = network()
    nn.init.ones_(net[0].bias)
    before = {key: p.detach().clone() for key, p in net.named_parameters()}
    optimizer = build_optimizer(net, Optimizer(name=name, learning_rate=0.1, weight_decay=0.5, decay_norm_and_bias=everywhere))
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for key, p in net.named_parameters():
        decays = everywhere or p.ndim > 1
        assert torch.equal(p, before[key]) == (not decays or not before[key].any()), key


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_not_finite_changes_neither_weights_nor_state(name, steps_before):
    net, other = network(torch.float32), network(torch.float32)
    settings = Optimizer(name=name, learning_rate=0.1, decay_norm_and_bias=False)
    pairs = [(one, build_optimizer(one, settings)) for one in (net, other)]
    for gated, (one, optimizer) in zip((True, False), pairs, strict=True):
        for step in range(steps_before):
            draw_gradients(one, step)
            optimizer.found_inf = torch.zeros(())
            optimizer.step()
        before = synthetic.copy_state({"weights": one.state_dict(), "optimizer": optimizer.state_dict()["state"]})
        if gated:
            draw_gradients(one, 8)
            one[0].weight.grad[0, 0, 0, 0], one[3].bias.grad[1] = math.nan, math.inf
            optimizer.found_inf = torch.ones(())
            optimizer.step()
            now = {"weights": one.state_dict(), "optimizer": optimizer.state_dict()["state"]}
            assert synthetic.identical(now["weights"], before["weights"])
            if steps_before:
                assert synthetic.identical(now["optimizer"], before["optimizer"])
    if steps_before:  # and it goes on as if nothing had happened
        for one, optimizer in pairs:
            draw_gradients(one, 9)
            optimizer.found_inf = torch.zeros(())
            optimizer.step()
        assert synthetic.identical(net.state_dict(), other.state_dict())


CHANGES = {"encoder": {"precision": "float32"}, "run": {"checkpoint_every_steps": 7}}


@pytest.mark.parametrize("name,everywhere", [("sgd", False), ("lars", True), ("lars", False), ("adamw", True), ("adamw", False)])
def test_a_run_is_resumed_to_the_last_bit_and_in_another_memory_format_the_same(name, everywhere):
    changes = {**CHANGES, "optimizer": {"name": name, "decay_norm_and_bias": everywhere, "learning_rate": 0.01}}
    whole, learner = synthetic.run(Ranks(), synthetic.recipe(**changes))
    _, resumed = synthetic.run(Ranks(), synthetic.recipe(**changes), whole.states[7])
    assert synthetic.identical(resumed.state_dict(), learner.state_dict())
    assert whole.losses()[-1] != pytest.approx(whole.losses()[0], abs=1e-3)  # it moved
    double = {**changes, "encoder": {"precision": "float64"}}
    expected, _ = synthetic.run(Ranks(), synthetic.recipe(**double))
    turned = {**double, "run": {"memory_format": "channels_last"}}
    log, _ = synthetic.run(Ranks(), synthetic.recipe(**turned), expected.states[7])
    assert log.losses() == pytest.approx(expected.losses()[7:], abs=1e-9)


@pytest.mark.parametrize("name", ["lars", "adamw"])
def test_a_loss_that_is_not_finite_stops_the_loop_with_all_as_it_was(name):
    from tests import test_resume

    recipe = synthetic.recipe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "recipe", lambda **changes: recipe(**changes, optimizer={"name": name}))
        message, step, unchanged = test_resume.blow_up(Ranks(), "loss")
    assert step == 10 and "step 10 " in message and unchanged


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_recipes_of_earlier_releases_keep_their_fingerprint_and_another_optimizer_has_another():
    text = synthetic.recipe().toml()
    older = "\n".join(line for line in text.splitlines() if not line.startswith(("name =", "decay_norm_and_bias =", "compile =")))
    assert len(older) < len(text)
    assert Recipe.of_text(older, "older") == synthetic.recipe()
    assert Recipe.of_overrides(["schedule.steps=10"]).fingerprint() == "7c4aedc536876eee"  # as before there was a choice
    prints = {synthetic.recipe(optimizer=o).fingerprint() for o in ({}, {"name": "lars"}, {"name": "adamw"}, {"decay_norm_and_bias": False})}
    assert len(prints) == 4
    compiled = synthetic.recipe(encoder={"compile": True})
    assert compiled.fingerprint() == synthetic.recipe().fingerprint() and compiled.differences(synthetic.recipe()) == []


def test_momentum_of_an_optimizer_that_has_none_is_refused():
    with pytest.raises(UserError, match="optimizer.sgd_momentum 0.8 is of sgd and lars"):
        synthetic.recipe(optimizer={"name": "adamw", "sgd_momentum": 0.8})
    assert synthetic.recipe(optimizer={"name": "lars", "sgd_momentum": 0.8}).optimizer.sgd_momentum == 0.8


@pytest.mark.parametrize("name", NAMES)
def test_the_published_rate_is_told_of_sgd_alone(name):
    recipe = synthetic.recipe(optimizer={"name": name}, contrast={"queue_keys": 20})
    plan = Plan(recipe, 300)
    shown = [describe(recipe, 300, Workers(1)), judged_rate(plan).found]
    assert [("0.03 at batch 256" in text) for text in shown] == [name == "sgd"] * 2
    assert ("decay_norm_and_bias" in shown[0] and "decay_norm_and_bias" in shown[1]) == (name == "lars")
    parameters = sum(p.numel() for p in Learner.new(recipe).f_q.parameters())
    assert plan.checkpoint_bytes(parameters) == {"adamw": 4}.get(name, 3) * parameters * 8 + plan.facts()["queue_bytes"]


@pytest.mark.parametrize("words", [{"name": "lars"}, {"decay_norm_and_bias": False}])
def test_the_released_codes_files_hold_only_its_own_optimizer(words, tmp_path):
    recipe = synthetic.recipe(optimizer=words, encoder={"backbone": "resnet18", "stem": "imagenet", "precision": "float32"})
    stored(Store(str(tmp_path / "run")), (Learner.new(recipe), recipe), (8,))
    (tmp_path / "run" / "plan.json").write_text('{"steps_per_epoch": 4}')
    with pytest.raises(UserError, match="another optimizer"):
        export(str(tmp_path / "run"), "moco", str(tmp_path / "run.pth.tar"))
    released = tmp_path / "theirs.pth.tar"
    torch.save({"epoch": 1, "state_dict": {"module.queue": torch.zeros(16, 100)}, "optimizer": {}}, released)
    with pytest.raises(UserError, match="give optimizer.name=sgd"):
        released_state(str(released), synthetic.plan(recipe))
