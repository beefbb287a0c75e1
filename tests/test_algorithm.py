"""The loop against two independent readings: the paper in NumPy, and the released code's order in torch."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moco_ray.learner import Learner
from moco_ray.method.batchnorm import GroupedBatchNorm2d
from moco_ray.method.momentum import key_encoder_of
from moco_ray.method.schedule import learning_rate
from moco_ray.method.shuffle import permutation
from moco_ray.ranks import Ranks
from moco_ray.train import train
from tests import synthetic

RECIPE = synthetic.recipe(
    augment=synthetic.PLAIN, optimizer={"learning_rate": 0.05, "weight_decay": 1e-3}, schedule={"warmup_steps": 3}
)
INPUT, HIDDEN, FEATURES, GROUP = 3 * 16 * 16, 12, 16, 4


class Small(nn.Module):
    """Linear, grouped BatchNorm, ReLU, linear: small enough to differentiate by hand."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(INPUT, HIDDEN), GroupedBatchNorm2d(HIDDEN, GROUP)
        self.last = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x.flatten(1))[:, :, None, None])).flatten(1))


def small_learner() -> Learner:
    learner = synthetic.small_learner(RECIPE)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        learner.f_q = Small().double()
    learner.f_k = key_encoder_of(learner.f_q)
    learner.optimizer = torch.optim.SGD(learner.f_q.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, fused=True)
    return learner


def losses_of_the_loop(learner: Learner) -> list[float]:
    plan, log = synthetic.plan(RECIPE), synthetic.Log()
    train(learner, synthetic.batches(plan, Ranks()), plan, Ranks(), log.outputs())
    return log.losses()


# --- the paper's Algorithm 1, row by row in NumPy, with its own backward pass -----------------------------------------


def forward(w, x):
    """x rows,D -> unit rows; keeps what backward needs."""
    hidden = x @ w["first.weight"].T + w["first.bias"]
    centred, spread = np.empty_like(hidden), np.empty_like(hidden)
    for g in range(0, len(x), GROUP):
        rows = hidden[g : g + GROUP]
        centred[g : g + GROUP] = rows - rows.mean(0)
        spread[g : g + GROUP] = np.sqrt(rows.var(0) + 1e-5)
    normal = centred / spread
    active = np.maximum(normal * w["norm.weight"] + w["norm.bias"], 0)
    out = active @ w["last.weight"].T + w["last.bias"]
    length = np.sqrt((out**2).sum(1, keepdims=True))
    return out / length, (x, spread, normal, active, length)


def backward(w, unit, kept, d_unit):
    x, spread, normal, active, length = kept
    d_out = (d_unit - unit * (d_unit * unit).sum(1, keepdims=True)) / length
    d_active = (d_out @ w["last.weight"]) * (active > 0)
    d_normal = d_active * w["norm.weight"]
    d_hidden = np.empty_like(d_normal)
    for g in range(0, len(x), GROUP):
        s = slice(g, g + GROUP)
        d, n = d_normal[s], normal[s]
        d_hidden[s] = (d - d.mean(0) - n * (d * n).mean(0)) / spread[s]
    return {
        "first.weight": d_hidden.T @ x, "first.bias": d_hidden.sum(0),
        "norm.weight": (d_active * normal).sum(0), "norm.bias": d_active.sum(0),
        "last.weight": d_out.T @ active, "last.bias": d_out.sum(0),
    }  # fmt: skip


def losses_in_numpy(learner: Learner) -> list[float]:
    plan, c, o = synthetic.plan(RECIPE), RECIPE.contrast, RECIPE.optimizer
    w_q = {name: p.detach().numpy().copy() for name, p in learner.f_q.named_parameters()}
    w_k, velocity = {n: p.copy() for n, p in w_q.items()}, {n: np.zeros_like(p) for n, p in w_q.items()}
    queue = [row.copy() for row in learner.queue.keys.numpy()]
    mean, std = np.array(RECIPE.augment.mean), np.array(RECIPE.augment.std)
    losses = []
    for step, batch in enumerate(synthetic.batches(plan, Ranks())):
        pixels = (batch.crops.numpy() / 255.0 - mean) / std  # B,2,H,W,3
        views = pixels.transpose(1, 0, 4, 2, 3).reshape(2, len(pixels), -1)
        q, kept = forward(w_q, views[0])
        perm = permutation(0, step, 8, GROUP).numpy()
        shuffled, _ = forward(w_k, views[1][perm])
        k = np.empty_like(shuffled)
        for slot, row in enumerate(perm):
            k[row] = shuffled[slot]
        loss, d_q = 0.0, np.zeros_like(q)
        for i in range(len(q)):
            candidates = np.stack([k[i], *queue])  # K+1,C: the positive first
            logits = candidates @ q[i] / c.temperature
            p = np.exp(logits - logits.max())
            p /= p.sum()
            loss -= np.log(p[0]) / len(q)
            p[0] -= 1
            d_q[i] = p @ candidates / c.temperature / len(q)
        losses.append(loss)
        for name, gradient in backward(w_q, q, kept, d_q).items():
            decayed = gradient + o.weight_decay * w_q[name]
            velocity[name] = decayed if step == 0 else o.sgd_momentum * velocity[name] + decayed
            w_q[name] = w_q[name] - learning_rate(plan, step) * velocity[name]
            w_k[name] = c.key_momentum * w_k[name] + (1 - c.key_momentum) * w_q[name]
        # Oldest first out: the queue starts as K random slots that are overwritten from slot 0 on.
        for j, key in enumerate(k):
            queue[(step * len(k) + j) % c.queue_keys] = key
    return losses


def test_losses_equal_a_numpy_reading_of_algorithm_1_over_20_steps():
    ours, theirs = losses_of_the_loop(small_learner()), losses_in_numpy(small_learner())
    assert len(ours) == 20 and ours == pytest.approx(theirs, abs=1e-10)


@pytest.mark.parametrize("wrong", ["follow", "shuffle", "enqueue"])
def test_the_numpy_reading_notices_a_wrong_loop(wrong):
    expected = losses_in_numpy(small_learner())
    broken = {
        "follow": mock.patch("moco_ray.train.follow", lambda k, q, m, healthy: None),
        "shuffle": mock.patch("moco_ray.ahead.permutation", lambda *a, **k: torch.arange(32)),
        "enqueue": mock.patch("moco_ray.method.queue.Queue.enqueue", lambda self, keys, step, healthy: None),
    }[wrong]
    with broken:
        ours = losses_of_the_loop(small_learner())
    assert max(abs(a - b) for a, b in zip(ours, expected, strict=True)) > 1e-4


# --- the released order: momentum update before the key forward, enqueue inside forward, C,K queue ---------------------


def losses_in_the_released_order(learner: Learner) -> tuple[list[float], torch.Tensor]:
    plan, c = synthetic.plan(RECIPE), RECIPE.contrast
    f_q, f_k, optimizer = learner.f_q, learner.f_k, learner.optimizer
    queue, pointer = learner.queue.keys.T.clone(), 0  # C,K
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (RECIPE.augment.mean, RECIPE.augment.std))
    losses = []
    for step, batch in enumerate(synthetic.batches(plan, Ranks())):
        im_q, im_k = ((batch.crops[:, v].permute(0, 3, 1, 2).double() / 255 - mean) / std for v in (0, 1))
        q = F.normalize(f_q(im_q), dim=1)
        with torch.no_grad():
            for p_q, p_k in zip(f_q.parameters(), f_k.parameters(), strict=True):
                p_k.data = p_k.data * c.key_momentum + p_q.data * (1.0 - c.key_momentum)
            perm = permutation(0, step, 8, GROUP)
            k = F.normalize(f_k(im_k[perm]), dim=1)[torch.argsort(perm)]
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / c.temperature
        for j in range(len(k)):  # the released code writes one slice, for it asserts K % batch == 0
            queue[:, (pointer + j) % c.queue_keys] = k[j]
        pointer = (pointer + len(k)) % c.queue_keys
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, queue.T


def test_losses_and_queue_equal_the_released_order_over_20_steps():
    ours = small_learner()
    losses = losses_of_the_loop(ours)
    expected, queue = losses_in_the_released_order(small_learner())
    assert losses == pytest.approx(expected, abs=1e-10)
    assert torch.allclose(ours.queue.keys, queue, atol=1e-10)


# --- the symmetric form, precision and memory format -----------------------------------------------------------------


def losses_of_the_symmetric_form(learner: Learner, recipe) -> tuple[list[float], torch.Tensor]:
    """As in the released CIFAR-10 demo: both losses against the queue as it was, their sum, then 2B keys at once."""
    plan, c = synthetic.plan(recipe), recipe.contrast
    f_q, f_k = learner.f_q, learner.f_k
    optimizer = torch.optim.SGD(f_q.parameters(), lr=0.1, momentum=0.9, weight_decay=recipe.optimizer.weight_decay)
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (recipe.augment.mean, recipe.augment.std))
    fifo, losses = list(learner.queue.keys), []
    for step, batch in enumerate(synthetic.batches(plan, Ranks())):
        x = [((batch.crops[:, v].permute(0, 3, 1, 2).double() / 255) - mean) / std for v in (0, 1)]
        queue, terms, keys = torch.stack(fifo), [], []
        for direction, (view_q, view_k) in enumerate(((0, 1), (1, 0))):
            perm = permutation(0, step, 8, GROUP, direction=direction)
            with torch.no_grad():
                k = F.normalize(f_k(x[view_k][perm]), dim=1)[torch.argsort(perm)]
            q = F.normalize(f_q(x[view_q]), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / c.temperature
            terms.append(F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)))
            keys.append(k)
        optimizer.param_groups[0]["lr"] = learning_rate(plan, step)
        optimizer.zero_grad()
        sum(terms).backward()
        optimizer.step()
        with torch.no_grad():
            for p_q, p_k in zip(f_q.parameters(), f_k.parameters(), strict=True):
                p_k.copy_(c.key_momentum * p_k + (1 - c.key_momentum) * p_q)
        for j, key in enumerate(torch.cat(keys)):
            fifo[(step * 2 * len(q) + j) % c.queue_keys] = key
        losses.append(sum(terms).item() / 2)
    return losses, torch.stack(fifo)


def test_the_symmetric_form_equals_the_released_demo():
    recipe = synthetic.recipe(augment=synthetic.PLAIN, contrast={"symmetric": True})
    ours = synthetic.small_learner(recipe)
    plan, log = synthetic.plan(recipe), synthetic.Log()
    train(ours, synthetic.batches(plan, Ranks()), plan, Ranks(), log.outputs())
    expected, queue = losses_of_the_symmetric_form(synthetic.small_learner(recipe), recipe)
    assert log.losses() == pytest.approx(expected, abs=1e-10)
    assert torch.allclose(ours.queue.keys, queue, atol=1e-10)


def test_channels_last_changes_the_layout_and_not_the_losses():
    expected = synthetic.run(Ranks(), synthetic.recipe())[0].losses()
    log, learner = synthetic.run(Ranks(), synthetic.recipe(run={"memory_format": "channels_last"}))
    assert learner.f_q.backbone[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert log.losses() == pytest.approx(expected, abs=1e-9)


def test_bfloat16_runs_the_encoders_alone_and_keeps_all_that_is_remembered_in_float32():
    short = {"schedule": {"steps": 4}}
    expected = synthetic.run(Ranks(), synthetic.recipe(encoder={"precision": "float32"}, **short))[0].losses()
    with mock.patch("moco_ray.train.normalize", side_effect=F.normalize) as normalize:
        log, learner = synthetic.run(Ranks(), synthetic.recipe(encoder={"precision": "bfloat16"}, **short))
    assert {call.args[0].dtype for call in normalize.call_args_list} == {torch.float32}
    state = synthetic.flat(learner.state_dict())
    assert {v.dtype for v in state.values() if isinstance(v, torch.Tensor)} == {torch.float32, torch.int64}
    assert log.losses() == pytest.approx(expected, rel=0.02) and log.losses() != expected
