"""Fast parts against plain ones: the same run in float64. And the step that benchmarks measure against is the released one."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moco_ray.learner import Learner
from moco_ray.method.batchnorm import GroupedBatchNorm2d
from moco_ray.method.contrast import Contrast
from moco_ray.method.shuffle import permutation
from moco_ray.method.small_maps import SmallMapConv2d
from moco_ray.ranks import Ranks
from moco_ray.train import train
from tests import released_step, synthetic


def plain_info_nce(q, k, queue, temperature):
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.clone().T], dim=1) / temperature
    loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long), reduction="none")
    logits = logits.detach()
    tie = logits[:, :1] - 8 * torch.finfo(q.dtype).eps / temperature
    return Contrast(loss, (logits[:, 1:] >= tie).sum(1), logits[:, 0] * temperature, logits[:, 1:].mean(1) * temperature)


def plain_follow(key_encoder, query_encoder, m, healthy):
    released_step.momentum(key_encoder.parameters(), query_encoder.parameters(), m)


def plain_write(queue, slots, keys, step, healthy):
    for slot, key in zip(range(slots.start, slots.stop), keys, strict=True):
        queue.keys[slot], queue.steps[slot] = key, step


def plain_batch_norm(layer, x, statistics):
    """By the formula, on every group."""
    y = x.unflatten(0, (-1, layer.group_rows))  # G,n,C,H,W
    mean, var = y.mean((1, 3, 4), keepdim=True), y.var((1, 3, 4), correction=0, keepdim=True)
    count = y[0, :, 0].numel()
    statistics[0] = mean.detach().flatten(1)
    statistics[1] = var.detach().flatten(1) * count / (count - 1)
    normal = ((y - mean) / (var + layer.eps).sqrt()).flatten(0, 1)
    return normal * layer.weight[:, None, None] + layer.bias[:, None, None]


class PlainSGD(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                v = group["m"] * self.state[p].get("v", torch.zeros_like(p)) + (p.grad + group["decay"] * p)
                self.state[p]["v"] = v
                p.copy_(p - group["lr"] * v)


PLAIN = {
    "moco_ray.train.info_nce": plain_info_nce,
    "moco_ray.train.follow": plain_follow,
    "moco_ray.method.queue.Queue._write": plain_write,
    "moco_ray.method.batchnorm.GroupedBatchNorm2d._group_by_group": plain_batch_norm,
    "moco_ray.method.small_maps.SmallMapConv2d.forward": nn.Conv2d.forward,
    "torch.compiler.is_compiling": lambda: True,  # BatchNorm's choice
}


def test_losses_over_20_steps_with_fused_parts_are_those_with_plain_ones():
    recipe = synthetic.recipe(optimizer={"learning_rate": 0.03})  # a ResNet-10
    assert isinstance(Learner.new(recipe).f_q.backbone.layer4[0].conv2, SmallMapConv2d)
    found = []
    for plain in (False, True):
        learner, plan, log = Learner.new(recipe), synthetic.plan(recipe), synthetic.Log()
        with contextlib.ExitStack() as patched:
            if plain:
                for name, part in PLAIN.items():
                    patched.enter_context(mock.patch(name, part))
                learner.optimizer = PlainSGD(learner.f_q.parameters(), dict(lr=0.0, m=recipe.optimizer.sgd_momentum, decay=recipe.optimizer.weight_decay))
            train(learner, synthetic.batches(plan, Ranks()), plan, Ranks(), log.outputs())
        found.append((log.losses(), learner))
    (fused, learner), (plain, other) = found
    assert len(fused) == 20 and fused != plain  # two computations
    assert fused == pytest.approx(plain, abs=1e-12)
    assert torch.allclose(learner.queue.keys, other.queue.keys, atol=1e-10)
    assert [e.tolist() for e in learner.queue.steps.split(50)] == [e.tolist() for e in other.queue.steps.split(50)]


# --- the reference of the benchmarks ----------------------------------------------------------------------------------

RELEASED = synthetic.recipe(
    augment=synthetic.PLAIN, batch={"bn_group_size": 16}, contrast={"queue_keys": 96}, schedule={"steps": 5, "shape": "multistep", "milestone_epochs": [9]}
)


def plainly_normalised(module: nn.Module) -> nn.Module:
    """With torch's BatchNorm2d in place of the grouped one, in float64."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, GroupedBatchNorm2d):
                setattr(parent, name, nn.BatchNorm2d(child.num_features))
    return module.double()


def both(ranks: Ranks):
    """Losses of five steps of our loop and of the released step, on the same rows in the same order, and both queues."""
    torch.set_num_threads(1)
    log, ours = synthetic.run(ranks, RELEASED)
    plan, start = synthetic.plan(RELEASED), synthetic.small_learner(RELEASED)
    model = released_step.Released(
        plainly_normalised(start.f_q), plainly_normalised(start.f_k), start.queue.keys.T.contiguous(), RELEASED.contrast.key_momentum, RELEASED.contrast.temperature
    )
    wrapped = nn.parallel.DistributedDataParallel(model)
    settings = RELEASED.optimizer
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), settings.learning_rate, settings.sgd_momentum, weight_decay=settings.weight_decay)
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (RELEASED.augment.mean, RELEASED.augment.std))
    losses = []
    for step, batch in enumerate(synthetic.batches(plan, ranks)):
        model.draw = lambda size, step=step: permutation(0, step, 2, 16)
        images = [(batch.crops[:, v].permute(0, 3, 1, 2).double() / 255 - mean) / std for v in (0, 1)]
        losses.append(released_step.released_step(wrapped, optimizer, *images))
    return log.losses(), losses, ours.queue.keys, model.queue.T


def test_the_step_that_benchmarks_measure_against_computes_what_ours_does(pool):
    answers = pool.run(2, both)
    theirs = [sum(pair) / 2 for pair in zip(*(answer[1] for answer in answers), strict=True)]
    assert answers[0][0] == pytest.approx(theirs, abs=1e-12) and len(theirs) == 5
    for _, _, queue, released in answers:
        assert torch.allclose(queue, released, atol=1e-12)
