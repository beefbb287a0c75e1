"""The paper's pieces against closed formulas and slow readings. No process group, no images."""

import math
from collections import deque
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import resnet18, resnet34, resnet50

from moco_ray import recipe as recipes
from moco_ray.errors import UserError
from moco_ray.method import products, small_maps
from moco_ray.method.batchnorm import GroupedBatchNorm2d, commit_statistics
from moco_ray.method.contrast import FEWEST_KEYS, chunk_keys, info_nce
from moco_ray.method.encoder import build_encoder, refuse_emulated_precision
from moco_ray.method.momentum import follow, key_encoder_of
from moco_ray.method.queue import EMPTY, Queue
from moco_ray.method.schedule import learning_rate
from moco_ray.method.small_maps import SmallMapConv2d
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe


def unit(*shape, seed=0, dtype=torch.float64):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=-1)


# --- momentum ---------------------------------------------------------------------------------------------------


def test_momentum_update_of_the_worked_example_gives_0_3002():
    query, key = nn.Linear(1, 1), nn.Linear(1, 1)
    with torch.no_grad():
        for p, q in zip(key.parameters(), query.parameters(), strict=True):
            p.fill_(0.30), q.fill_(0.50)
    for healthy in (None, torch.tensor(True)):
        with torch.no_grad():
            key.weight.fill_(0.30)
        follow(key, query, 0.999, healthy)
        assert key.weight.item() == pytest.approx(0.3002, abs=1e-7)


def test_momentum_update_covers_every_parameter_and_nothing_when_the_step_was_not_finite():
    query = build_encoder(recipes.Encoder(backbone="resnet10"), 2, seed=0)
    key = key_encoder_of(query)
    with torch.no_grad():
        for p in query.parameters():
            p.add_(1.0)
    before = [p.clone() for p in key.parameters()]
    follow(key, query, 0.9, torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(before, key.parameters(), strict=True))
    follow(key, query, 0.9, torch.tensor(True))
    for old, new in zip(before, key.parameters(), strict=True):
        assert torch.allclose(new, old + 0.1, atol=1e-6)
    assert not any(p.requires_grad for p in key.parameters())


# --- contrast ---------------------------------------------------------------------------------------------------

CHUNK = chunk_keys(6, torch.device("cpu"))


@pytest.mark.parametrize("keys", [1, 100, CHUNK + 7])
def test_loss_is_log_of_K_plus_1_when_all_keys_are_equal_and_no_choice_is_right(keys):
    k = unit(1, 16)
    contrast = info_nce(unit(5, 16, seed=1), k.expand(5, 16), k.expand(keys, 16), 0.07)
    assert torch.allclose(contrast.loss, torch.full((5,), math.log(keys + 1), dtype=torch.float64), atol=1e-12)
    assert (contrast.rank > 0).all()  # ties count against the query


@pytest.mark.parametrize("temperature", [1e-4, 0.005, 0.0299, 0.03, 0.07, 0.2])
@pytest.mark.parametrize("keys", [50, 2 * CHUNK + 3])
def test_loss_and_gradient_equal_cross_entropy_over_all_logits(keys, temperature):
    q, k, queue = unit(6, 16, seed=1).requires_grad_(), unit(6, 16, seed=2), unit(keys, 16, seed=3)
    contrast = info_nce(q, k, queue, temperature)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((contrast.loss * weights).sum(), q)

    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / temperature
    expected = F.cross_entropy(logits, torch.zeros(6, dtype=torch.int64), reduction="none")
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), q)
    assert torch.allclose(contrast.loss, expected, atol=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    assert torch.equal(contrast.rank, (logits[:, 1:] >= logits[:, :1]).sum(1))
    assert torch.allclose(contrast.positive_similarity, (q * k).sum(1))
    assert torch.allclose(contrast.negative_similarity, (q @ queue.T).mean(1))


@pytest.mark.parametrize("temperature", [1e-3, 0.01, 0.03])
def test_float32_loss_at_low_temperatures_is_finite_and_close_to_float64(temperature):
    q, queue = unit(8, 128, seed=1), unit(9000, 128, seed=3)
    for k, keys in ((q, queue), (-q, queue), (-q, -q), (unit(8, 128, seed=2), torch.cat([queue, q]))):  # best and worst there can be
        exact, single = info_nce(q, k, keys, temperature), info_nce(q.float(), k.float(), keys.float(), temperature)
        assert torch.isfinite(single.loss).all()
        assert torch.allclose(single.loss.double(), exact.loss, rtol=1e-5, atol=2e-6 / temperature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rows_are_summed_in_float32(dtype):
    q, k, queue = (x.to(dtype) for x in (unit(8, 64, seed=1), unit(8, 64, seed=2), unit(20_000, 64, seed=3)))
    q.requires_grad_()
    found = info_nce(q, k, queue, 0.07)
    exact = info_nce(q.detach().double().requires_grad_(), k.double(), queue.double(), 0.07)
    assert found.loss.dtype == torch.float32
    assert torch.allclose(found.loss.double(), exact.loss, rtol=1e-5)
    assert (found.rank - exact.rank).abs().max() <= 2  # keys within rounding of the own one count as ties
    (gradient,) = torch.autograd.grad(found.loss.sum(), q)
    assert gradient.dtype == dtype


class Largest(TorchDispatchMode):
    """Notes the largest memory, in bytes, that any operation's result lies in."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor):
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("turned", [False, True])
def test_a_product_is_the_matrix_product_in_float32_by_either_library(fast, turned):
    if fast and not products._has_fast_operator():
        assert "AVX512" not in torch.backends.cpu.get_cpu_capability()  # elsewhere it must be there: torch is pinned
        pytest.skip("no AVX-512")
    x, weight = unit(7, 300, dtype=torch.float32), unit(300, 33, seed=1, dtype=torch.float32).T if turned else unit(33, 300, seed=1, dtype=torch.float32)
    with mock.patch.object(products, "_has_fast_operator", lambda: fast):
        found = products.product(x, weight)
        exact = products.product(x.double(), weight.double())
    assert found.dtype == torch.float32 and exact.dtype == torch.float64
    assert exact.allclose(x.double() @ weight.double().T, atol=1e-15)
    assert found.double().allclose(exact, atol=2e-7)


@pytest.mark.parametrize("rows,keys,chunk", [(32, 8192, 2048), (32, 65536, 2048), (300, 8192, FEWEST_KEYS)])
def test_memory_is_that_of_a_chunks_logits_whatever_K(rows, keys, chunk):
    torch.set_num_threads(1)
    key, q = unit(1, 8, dtype=torch.float32), unit(rows, 8, seed=1, dtype=torch.float32)
    with Largest() as largest:
        info_nce(q, key.expand(rows, 8), key.expand(keys, 8), 0.2)  # a queue without memory of its own
    assert largest.bytes == 4 * rows * chunk


def test_four_million_keys_and_32_queries_have_the_loss_of_the_closed_formula():
    torch.set_num_threads(1)  # two wait for each other at every chunk where a core is busy otherwise
    key, q, size = unit(1, 8, dtype=torch.float32), unit(32, 8, seed=1, dtype=torch.float32), 4_194_304
    contrast = info_nce(q, key.expand(32, 8), key.repeat(size, 1), 0.2)
    assert torch.allclose(contrast.loss, torch.full((32,), math.log(size + 1)), rtol=1e-5)
    assert (contrast.rank == size).all()


def test_the_queue_may_change_between_forward_and_backward():
    q, k, queue = unit(3, 8, seed=1).requires_grad_(), unit(3, 8, seed=2), unit(20, 8, seed=3)
    (expected,) = torch.autograd.grad(info_nce(q, k, queue, 0.2).loss.sum(), q)
    loss = info_nce(q, k, queue, 0.2).loss.sum()
    queue.zero_()
    assert torch.equal(torch.autograd.grad(loss, q)[0], expected)


# --- queue ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size,batch", [(12, 4), (10, 4), (7, 3), (5, 5), (4, 9), (1, 2), (100, 1)])
def test_queue_keeps_the_last_K_keys_in_order(size, batch):
    queue, model = Queue(size, 3, seed=0), deque(maxlen=size)
    for step in range(25):
        keys = torch.full((batch, 3), float(step)) + torch.arange(batch)[:, None] / 100
        queue.enqueue(keys, step)
        model.extend((row, step) for row in keys)
        assert queue.filled == len(model)
        oldest = queue.position if queue.filled == size else 0
        order = [(oldest + i) % size for i in range(len(model))]
        assert torch.equal(queue.keys[order], torch.stack([row for row, _ in model]))
        assert queue.steps[order].tolist() == [s for _, s in model]


def test_a_new_queue_holds_random_unit_vectors_that_no_step_made():
    queue = Queue(500, 16, seed=3)
    assert torch.allclose(queue.keys.norm(dim=1), torch.ones(500), atol=1e-6)
    assert (queue.steps == EMPTY).all() and queue.fill == 0.0
    assert queue.keys.mean(0).abs().max() < 5 / math.sqrt(500 * 16)
    assert torch.equal(queue.keys, Queue(500, 16, seed=3).keys)
    assert not torch.equal(queue.keys, Queue(500, 16, seed=4).keys)


def test_queue_slots_do_not_change_after_a_step_that_was_not_finite():
    queue = Queue(6, 2, seed=0)
    queue.enqueue(torch.ones(4, 2), 0)
    keys, steps = queue.keys.clone(), queue.steps.clone()
    queue.enqueue(torch.full((4, 2), float("nan")), 1, torch.tensor(False))
    assert torch.equal(queue.keys, keys) and torch.equal(queue.steps, steps)


def test_queue_fingerprint_tells_changed_and_swapped_keys_apart():
    queue = Queue(6, 4, seed=0)
    first = queue.fingerprint()
    assert torch.equal(first, Queue(6, 4, seed=0).fingerprint())
    queue.keys[[1, 2]] = queue.keys[[2, 1]]
    assert not torch.equal(first, queue.fingerprint())
    queue.keys[[1, 2]] = queue.keys[[2, 1]]
    assert torch.equal(first, queue.fingerprint())
    queue.keys[3, 2] = torch.nextafter(queue.keys[3, 2], torch.tensor(2.0))
    assert not torch.equal(first, queue.fingerprint())


def test_queue_state_comes_back_whole_and_a_foreign_one_is_refused():
    queue = Queue(5, 3, seed=0)
    queue.enqueue(unit(7, 3, dtype=torch.float32), 4)
    other = Queue(5, 3, seed=9)
    other.load_state_dict(queue.state_dict())
    assert torch.equal(other.fingerprint(), queue.fingerprint()) and other.filled == 5
    with pytest.raises(ValueError, match="shape"):
        Queue(6, 3, seed=0).load_state_dict(queue.state_dict())
    with pytest.raises(ValueError, match="version"):
        other.load_state_dict({**queue.state_dict(), "version": 2})


# --- grouped BatchNorm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_each_group_is_normalised_as_torch_batch_norm_would_alone(layout):
    x = torch.randn(12, 5, 3, 3, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    ours, theirs = GroupedBatchNorm2d(5, 4).double(), nn.BatchNorm2d(5).double()
    weights = torch.randn_like(x)
    with torch.no_grad():
        for layer in (ours, theirs):
            layer.weight.copy_(torch.arange(1.0, 6.0)), layer.bias.copy_(torch.arange(5.0))
    expected = torch.cat([theirs(rows) for rows in x.split(4)])
    gradients = torch.autograd.grad((ours(x) * weights).sum(), (x, *ours.parameters()))
    expected_gradients = torch.autograd.grad((expected * weights).sum(), (x, *theirs.parameters()))
    assert torch.equal(ours(x), expected) and torch.equal(gradients[0], expected_gradients[0])
    for gradient, expected_gradient in zip(gradients[1:], expected_gradients[1:], strict=True):
        assert torch.allclose(gradient, expected_gradient, atol=1e-12)  # sums over groups
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours(x.detach()).is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_written_to_their_place_are_those_put_together_afterwards(layout, dtype):
    """As under autocast: rows in bfloat16, weights and statistics in float32."""
    x = torch.randn(12, 5, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype).contiguous(memory_format=layout).requires_grad_()
    found = []
    for compiling in (False, True):  # then the plain formula is what is compiled
        layer = GroupedBatchNorm2d(5, 4)
        with mock.patch("torch.compiler.is_compiling", return_value=compiling):
            y = layer(x)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), (x, layer.weight, layer.bias)), layer.sums, layer.groups_seen])
    assert [one.dtype for one in found[0]] == [one.dtype for one in found[1]]
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_running_statistics_move_once_a_step_by_the_mean_over_groups_however_many_passes():
    x = torch.randn(12, 5, 3, 3, dtype=torch.float64) * 3 + 1
    whole, parts = GroupedBatchNorm2d(5, 4).double(), GroupedBatchNorm2d(5, 4).double()
    whole(x)
    for rows in x.split(4):
        parts(rows)
    assert torch.equal(whole.running_mean, torch.zeros(5).double())  # nothing moves before the commit
    for layer in (whole, parts):
        commit_statistics(layer, torch.tensor(True))
        means = torch.stack([rows.mean((0, 2, 3)) for rows in x.split(4)]).mean(0)
        variances = torch.stack([rows.var((0, 2, 3)) for rows in x.split(4)]).mean(0)  # unbiased
        assert torch.allclose(layer.running_mean, 0.1 * means) and layer.num_batches_tracked == 1
        assert torch.allclose(layer.running_var, 0.9 + 0.1 * variances)


def test_a_step_that_was_not_finite_leaves_running_statistics_alone_and_is_forgotten():
    layer = GroupedBatchNorm2d(2, 2)
    layer(torch.full((4, 2, 1, 1), float("nan")))
    commit_statistics(layer, torch.tensor(False))
    assert torch.equal(layer.running_var, torch.ones(2)) and layer.num_batches_tracked == 0
    layer(torch.randn(4, 2, 1, 1))
    commit_statistics(layer, torch.tensor(True))
    assert torch.isfinite(layer.running_mean).all()


# --- encoder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,torchvision_model", [("resnet18", resnet18), ("resnet34", resnet34), ("resnet50", resnet50)]
)
def test_backbone_is_torchvisions_by_name_shape_and_output(name, torchvision_model):
    ours = build_encoder(recipes.Encoder(backbone=name), 2, seed=0).backbone
    theirs = torchvision_model()
    expected = {k: v.shape for k, v in theirs.state_dict().items() if not k.startswith("fc.")}
    assert {k: v.shape for k, v in ours.state_dict().items()} == expected
    theirs.load_state_dict(ours.state_dict(), strict=False)
    theirs.fc = nn.Identity()
    x = torch.randn(2, 3, 64, 64)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), atol=1e-5)  # small maps are summed in another order


@pytest.mark.parametrize("stem,size", [("imagenet", 2), ("small_stride1", 8), ("small_stride2", 4)])
@pytest.mark.parametrize("head,layers", [("linear", 1), ("mlp", 3)])
def test_stems_and_heads_have_the_stated_shapes(stem, size, head, layers):
    encoder = build_encoder(recipes.Encoder(backbone="resnet10", stem=stem, head=head, feature_dim=24), 2, seed=0)
    backbone, x = encoder.backbone, torch.randn(2, 3, 64, 64)
    seen = {}
    backbone.layer4.register_forward_hook(lambda m, i, o: seen.update(size=o.shape[-1]))
    assert encoder(x).shape == (2, 24) and backbone(x).shape == (2, 512) and seen["size"] == size
    assert len([encoder.head] if head == "linear" else list(encoder.head)) == layers


def test_weights_depend_on_the_seed_alone_and_leave_the_global_random_state():
    torch.manual_seed(5)
    state = torch.get_rng_state()

    def build(seed, precision="float32"):
        return build_encoder(recipes.Encoder(backbone="resnet10", precision=precision), 2, seed)

    first = build(1)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(6)
    again, other, double = build(1), build(2), build(1, "float64")
    weight = first.backbone.conv1.weight
    assert torch.equal(weight, again.backbone.conv1.weight) and not torch.equal(weight, other.backbone.conv1.weight)
    assert torch.equal(weight.double(), double.backbone.conv1.weight)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size,stride,kernel", [(1, 1, 3), (2, 1, 3), (2, 2, 3), (4, 2, 3), (3, 2, 3), (8, 1, 3), (2, 1, 1), (4, 2, 1)])
def test_small_map_convolution_has_the_values_and_gradients_of_conv2d(size, stride, kernel, layout):
    plain = nn.Conv2d(6, 10, kernel, stride=stride, padding=kernel // 2, bias=False).double().to(memory_format=layout)
    ours = SmallMapConv2d.like(plain)
    x = torch.randn(5, 6, size, size, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    expected = plain(x)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), (x, plain.weight))
    got = torch.autograd.grad((ours(x) * weights).sum(), (x, ours.weight))
    assert torch.allclose(ours(x), expected, atol=1e-12) and ours.weight is plain.weight
    assert ours(x).is_contiguous(memory_format=layout)
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_small_map_convolution_in_bfloat16_is_as_near_to_float32_as_conv2ds(size):
    plain = nn.Conv2d(64, 32, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
    ours, found = SmallMapConv2d.like(plain), []
    x = torch.randn(8, 64, size, size).contiguous(memory_format=torch.channels_last).requires_grad_()
    for layer, enabled in ((plain, False), (plain, True), (ours, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = layer(x)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), (x, plain.weight))])
    assert [one.dtype for one in found[1]] == [one.dtype for one in found[2]]
    for exact, library, own in zip(*found, strict=True):
        assert (own.float() - exact).abs().max() <= 2 * (library.float() - exact).abs().max()


def test_encoder_uses_matrix_products_where_maps_are_small_and_only_there():
    encoder, used = build_encoder(recipes.Encoder(backbone="resnet10", stem="small_stride2"), 2, seed=0), []
    encoder, images = (one.to(memory_format=torch.channels_last) for one in (encoder, torch.randn(2, 3, 32, 32)))
    apply = small_maps._SmallMapConvolution.apply
    with mock.patch.object(small_maps._SmallMapConvolution, "apply", lambda x, w, *rest: used.append(tuple(w.shape)) or apply(x, w, *rest)):
        encoder(images)
        last_stage = [(512, 256, 3, 3), (512, 512, 3, 3), (512, 256, 1, 1)]  # with the 2x2 maps
        assert used == last_stage
        with torch.autocast("cpu", torch.bfloat16):
            encoder(images)
        assert used[3:] == [(256, 128, 3, 3), (256, 256, 3, 3), (256, 128, 1, 1), *last_stage]  # and 4x4


def test_bfloat16_is_refused_on_a_cpu_that_only_emulates_it():
    bfloat16, cpu = recipes.Encoder(precision="bfloat16"), torch.device("cpu")
    with mock.patch("moco_ray.method.encoder.cpu_has_bfloat16", return_value=False):
        with pytest.raises(UserError, match="encoder.precision=float32"):
            refuse_emulated_precision(bfloat16, cpu)
        refuse_emulated_precision(bfloat16, torch.device("cuda"))
        refuse_emulated_precision(recipes.Encoder(), cpu)
    with mock.patch("moco_ray.method.encoder.cpu_has_bfloat16", return_value=True):
        refuse_emulated_precision(bfloat16, cpu)


# --- schedule ---------------------------------------------------------------------------------------------------


def schedule_plan(rows=100, **schedule):
    values = {"batch": {"global_batch_size": 10, "bn_group_size": 5}, "optimizer": {"learning_rate": 0.03}}
    return Plan(Recipe.parse({**values, "schedule": schedule}), rows)


def test_cosine_starts_at_the_base_rate_and_halves_in_the_middle():
    plan = schedule_plan(epochs=4)
    assert learning_rate(plan, 0) == 0.03
    assert learning_rate(plan, 20) == pytest.approx(0.015)
    assert learning_rate(plan, 39) == pytest.approx(0.03 * 0.5 * (1 + math.cos(math.pi * 39 / 40)))
    for epoch in range(4):  # the released code's rate at the start of each epoch
        assert learning_rate(plan, epoch * 10) == pytest.approx(0.03 * 0.5 * (1 + math.cos(math.pi * epoch / 4)))


def test_warm_up_rises_linearly_to_the_base_rate_before_the_cosine():
    plan = schedule_plan(steps=25, warmup_steps=5)
    assert [learning_rate(plan, s) for s in range(6)] == pytest.approx([0.006, 0.012, 0.018, 0.024, 0.03, 0.03])
    assert learning_rate(plan, 15) == pytest.approx(0.015)


def test_multistep_multiplies_by_the_factor_at_each_milestone():
    plan = schedule_plan(epochs=5, shape="multistep", milestone_epochs=[2, 4])
    assert [learning_rate(plan, s) for s in (0, 19, 20, 39, 40, 49)] == pytest.approx(
        [0.03, 0.03, 3e-3, 3e-3, 3e-4, 3e-4]
    )
