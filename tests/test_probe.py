"""Training on labels: the published numbers, a backbone that stays as it is, and any number of ranks."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from moco_ray.data.subset import share_of_each_class
from moco_ray.errors import NonFinite, UserError
from moco_ray.evaluate import probe, protocols
from moco_ray.evaluate.probe import Student, fingerprint, new_head
from moco_ray.evaluate.protocols import Choices, group_rows
from moco_ray.evaluate.scores import Tally
from moco_ray.evaluate.sweep import Settings, batches_of_epoch, split, sweep
from moco_ray.method.schedule import learning_rate
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from tests import synthetic

ROWS, CLASSES, BATCH = 300, 7, 96  # 3 groups of 32 rows: two ranks own two and one; 3 steps an epoch, 12 rows left out
LABELS = torch.from_numpy(np.random.default_rng(5).integers(0, CLASSES, ROWS))


def base(**changes):
    sets = {"bank_uri": "train", "query_uri": "test", "resize_pixels": 16}
    return synthetic.recipe(**{"evaluation": sets, **changes})


def protocol_of(kind: str, epochs: int = 3, rate: float | None = None):
    choices = Choices(epochs, rate, BATCH)
    found = protocols.linear(base(), choices) if kind == "linear" else protocols.finetune(base(), choices, 100)
    recipe = found.recipe.model_copy(update={"encoder": found.recipe.encoder.model_copy(update={"precision": "float64"})})
    return protocols.Protocol(**{**vars(found), "recipe": recipe})


def student_of(protocol) -> Student:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        backbone = synthetic.SmallEncoder(protocol.recipe.batch.bn_group_size, 4).backbone
    return Student.new(backbone, new_head(12, CLASSES, protocol.recipe.run.seed), protocol)


def judge(ranks: Ranks, network: nn.Module):
    x = torch.randn(50, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(50) % CLASSES
    own = np.array_split(np.arange(50), ranks.world)[ranks.rank]
    tally = Tally(CLASSES, ranks.device)
    tally.add(network(x[own]), y[own])
    return tally.scores(ranks)


def carry(ranks: Ranks, kind: str, state: dict | None = None, until: int = 3, rate: float | None = None):
    """Train as `ranks`; the student's state and the backbone's tensors after each epoch."""
    torch.set_num_threads(1)
    protocol = protocol_of(kind, rate=rate)
    plan, student, states = Plan(protocol.recipe, ROWS), student_of(protocol), []
    if state:
        student.load_state_dict(state)
    rows = synthetic.batches(plan, ranks, student.epoch * plan.steps_per_epoch)
    rows = (batch for _, batch in zip(range((until - student.epoch) * plan.steps_per_epoch), rows, strict=False))

    def finished(held):
        states.append([synthetic.copy_state(held.state_dict()), synthetic.copy_state(held.network.backbone.state_dict())])

    probe.train(student, rows, LABELS, plan, ranks, functools.partial(judge, ranks), finished)
    return states


@pytest.mark.parametrize("kind", ["linear", "finetune"])
@pytest.mark.parametrize("world", [2, 3])
def test_the_result_does_not_depend_on_the_number_of_workers(pool, kind, world):
    rate = 0.5 if kind == "linear" else None
    alone, together = pool.run(1, carry, kind, None, 3, rate)[0], pool.run(world, carry, kind, None, 3, rate)
    head = alone[-1][0]["trained"]["weight" if kind == "linear" else "head.weight"]
    assert (head - new_head(12, CLASSES, 0).weight).abs().max() > 0.01  # it was trained
    for states in together:
        for (state, backbone), (alone_state, alone_backbone) in zip(states, alone, strict=True):
            history, alone_history = state.pop("history"), dict(alone_state).pop("history")
            assert all(entry == pytest.approx(other, abs=1e-9) for entry, other in zip(history, alone_history, strict=True))
            assert synthetic.largest_difference(state, {k: v for k, v in alone_state.items() if k != "history"}) < 1e-9
            assert synthetic.largest_difference(backbone, alone_backbone) < 1e-9


def test_a_linear_classifier_leaves_the_backbone_bit_for_bit_and_finetuning_does_not():
    for kind, same in (("linear", True), ("finetune", False)):
        before = student_of(protocol_of(kind)).network.backbone
        state, after = carry(Ranks(), kind)[-1]
        assert synthetic.identical(before.state_dict(), after) is same
        assert ("head.weight" in state["trained"]) is not same  # of a frozen backbone nothing is kept
    moved = [name for name, tensor in before.state_dict().items() if not torch.equal(tensor, after[name])]
    assert len(moved) == len(after)  # weights, running statistics and their count


@pytest.mark.parametrize("change", ["weight", "statistics"])
def test_a_frozen_backbone_that_changes_by_one_value_is_refused(monkeypatch, change):
    original = probe._Step.__call__

    def meddling(self, number, batch):
        original(self, number, batch)
        if number == 4:
            norm = self._student.network.backbone[1]
            with torch.no_grad():
                (norm.weight if change == "weight" else norm.running_var)[3] += 1e-12

    monkeypatch.setattr(probe._Step, "__call__", meddling)
    with pytest.raises(RuntimeError, match="frozen backbone changed"):
        carry(Ranks(), "linear")


def test_the_published_protocol_s_numbers():
    """main_lincls.py of the released code, its defaults; the crop is torchvision's default scale."""
    found = protocols.linear(base(augment={"image_pixels": 224}, evaluation={"bank_uri": "a", "query_uri": "b", "resize_pixels": 256}), Choices())
    recipe, plan = found.recipe, Plan(found.recipe, 256 * 10)
    assert [learning_rate(plan, 10 * epoch) for epoch in (0, 59, 60, 79, 80, 99)] == pytest.approx([30, 30, 3, 3, 0.3, 0.3])
    assert (plan.total_steps, recipe.batch.global_batch_size, recipe.batch.groups) == (1000, 256, 8)
    held = {"name": "sgd", "learning_rate": 30.0, "sgd_momentum": 0.9, "weight_decay": 0.0, "gradient_reduction": "exact", "decay_norm_and_bias": True}
    assert recipe.optimizer.model_dump() == held
    augment = recipe.augment
    assert (augment.image_pixels, recipe.evaluation.resize_pixels, augment.crop_scale, augment.flip_probability) == (224, 256, (0.08, 1.0), 0.5)
    assert augment.jitter_probability == augment.grayscale_probability == augment.blur_probability == 0.0 and not any(augment.jitter)
    assert found.classifier_rate == 30.0 and not found.tuned and recipe.encoder.precision == "float32"


def test_the_classifier_starts_from_a_normal_of_a_hundredth_and_zeros():
    head = new_head(2048, 1000, 0)
    n = head.weight.numel()
    assert abs(float(head.weight.detach().double().std()) / 0.01 - 1) < 5 / math.sqrt(2 * n) and abs(float(head.weight.detach().double().mean())) < 0.01 * 5 / math.sqrt(n)
    assert not head.bias.any() and torch.equal(head.weight, new_head(2048, 1000, 0).weight) and not torch.equal(head.weight, new_head(2048, 1000, 1).weight)


def test_with_other_epochs_the_steps_stay_at_their_shares_and_one_batch_s_groups_hold_up_to_32_rows():
    for epochs, steps in ((10, [6, 8]), (3, [2]), (1, [1])):
        assert list(protocols.linear(base(), Choices(epochs)).recipe.schedule.milestone_epochs) == steps
    assert [group_rows(size) for size in (256, 4096, 64, 32, 20, 6, 4)] == [32, 32, 32, 16, 10, 3, 2]
    for size in (1, 2, 3, 7):
        with pytest.raises(UserError, match="--batch-size"):
            group_rows(size)


def test_finetuning_gives_the_classifier_its_own_rate_and_half_a_cosine():
    found = protocols.finetune(base(), Choices(), 1)
    student = Student.new(synthetic.SmallEncoder(32, 4).backbone, new_head(12, CLASSES, 0), found)
    student.set_rate(learning_rate(Plan(found.recipe, 2560), 100))  # half of 20 epochs of 10 steps
    assert [group["lr"] for group in student.optimizer.param_groups] == pytest.approx([0.25, 0.001])
    assert found.name == "finetune-1" and found.tuned and found.recipe.schedule.epochs == 20
    with pytest.raises(UserError, match="1, 10 or 100"):
        protocols.finetune(base(), Choices(), 5)


def test_one_step_is_that_of_plain_torch():
    """The released loop written out: eval-mode features, mean cross-entropy, torch's SGD."""
    protocol = protocol_of("linear", rate=2.0)
    plan, student = Plan(protocol.recipe, ROWS), student_of(protocol)
    theirs = nn.Sequential(student_of(protocol).network.backbone.eval(), new_head(12, CLASSES, 0).double())
    optimizer = torch.optim.SGD(theirs[1].parameters(), 2.0, momentum=0.9)
    rows = [batch for _, batch in zip(range(3), synthetic.batches(plan, Ranks()), strict=False)]
    for number, batch in enumerate(rows):
        x = probe.colour_stage(batch.crops[:, 0], batch.positions.numpy(), 0, 0, 0, protocol.recipe.augment, torch.float64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(x), LABELS[batch.rows]).backward()
        optimizer.param_groups[0]["lr"] = learning_rate(plan, number)
        optimizer.step()
    states = []
    probe.train(student, iter(rows), LABELS, plan, Ranks(), functools.partial(judge, Ranks()), lambda held: states.append(held.epoch))
    assert states == [1] and synthetic.largest_difference(student.network.head.state_dict(), theirs[1].state_dict()) < 1e-12


@pytest.mark.parametrize("kind", ["linear", "finetune"])
def test_going_on_from_an_epoch_s_state_equals_never_having_stopped(kind, tmp_path):
    straight = carry(Ranks(), kind)
    stopped = carry(Ranks(), kind, until=1)[-1][0]
    torch.save(stopped, tmp_path / "state.pt")
    resumed = carry(Ranks(), kind, torch.load(tmp_path / "state.pt", weights_only=True))
    assert len(resumed) == 2 and synthetic.identical(resumed[-1], straight[-1])
    with pytest.raises(UserError, match="version 7"):
        carry(Ranks(), kind, {**stopped, "version": 7})


def test_last_and_best_epoch_are_told_apart_and_the_first_of_equals_is_the_best():
    student = student_of(protocol_of("linear"))
    for share in (0.2, 0.6, 0.6, 0.4):
        student.finish_epoch({}, probe.Scores(share, None, [share], [[1]]))
    assert (student.last["top1"], student.best["top1"], student.best_epoch, student.epoch) == (0.4, 0.6, 2, 4)


def test_a_rate_that_diverges_is_told_at_once_on_all_ranks(pool):
    with pytest.raises(NonFinite, match=r"not finite at step \d of 9, .*smaller --learning-rate"):
        pool.run(2, carry, "linear", None, 3, 1e308)


def test_a_share_of_labels_is_that_share_of_each_class_and_follows_the_seed():
    labels = np.random.default_rng(0).choice(5, 4000, p=[0.5, 0.3, 0.1, 0.09, 0.01])
    for percent in (1, 10, 100):
        rows = share_of_each_class(labels, percent, 0).rows
        counts, whole = np.bincount(labels[rows], minlength=5), np.bincount(labels)
        assert counts.tolist() == [max(1, int(n * percent / 100 + 0.5)) for n in whole] and (np.diff(rows) > 0).all()
    assert share_of_each_class(labels, 10, 0) == share_of_each_class(labels, 10, 0) != share_of_each_class(labels, 10, 1)


@pytest.fixture(scope="module")
def features():
    """Four clouds in ten dimensions, so near that nobody is right always: training and test rows."""
    draws = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 10, generator=draws, dtype=torch.float64)
    y = torch.randint(0, 6, (900,), generator=draws)
    x = centres[y] + 1.2 * torch.randn(900, 10, generator=draws, dtype=torch.float64)
    return x[:600], y[:600], x[600:], y[600:]


def test_a_sweep_s_classifier_is_the_one_trained_alone_by_torch_s_sgd(features):
    x, y, test_x, test_y = features
    settings = Settings((0.01, 0.1, 1.0), epochs=10, batch_size=50)
    found = sweep(x, y, test_x, test_y, settings)
    _, rest = split(len(x), 0)
    head = new_head(10, 6, 0).double()
    optimizer = torch.optim.SGD(head.parameters(), found.rate, momentum=0.9)
    tops = []
    for epoch in range(10):
        optimizer.param_groups[0]["lr"] = found.rate * (1.0 if epoch < 6 else 0.1 if epoch < 8 else 0.01)
        for rows in batches_of_epoch(len(rest), settings, epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(x[rest][rows]), y[rest][rows]).backward()
            optimizer.step()
        tops.append((head(test_x).argmax(1) == test_y).double().mean().item())
    assert [entry["test_top1"] for entry in found.history] == pytest.approx(tops)
    assert found.last.top1 == pytest.approx(tops[-1]) and found.best.top1 == pytest.approx(max(tops))
    assert tops[found.best_epoch - 1] == max(tops) and sum(map(sum, found.last.confusion)) == 300
    assert sweep(x, y, test_x, test_y, Settings((found.rate,), epochs=10, batch_size=50)).last.top1 == pytest.approx(tops[-1])


def test_a_sweep_chooses_on_held_out_training_rows_never_on_the_test_rows(features):
    x, y, test_x, test_y = features
    settings = Settings((1e-6, 0.1), epochs=8, batch_size=50)
    held, rest = split(len(x), 0)
    assert len(held) == 60 and sorted(torch.cat([held, rest]).tolist()) == list(range(600))
    found = sweep(x, y, test_x, test_y, settings)
    hostile = sweep(x, y, -test_x, test_y.roll(1), settings)  # a test set on which nothing learned is of use
    assert found.rate == hostile.rate == 0.1 and found.held_out == hostile.held_out
    spoiled = y.clone()
    spoiled[held] = (y[held] + 1) % 6  # whoever learns nothing is better here
    assert sweep(x, spoiled, test_x, test_y, settings).held_out[0.1] < found.held_out[0.1]


def test_a_rate_of_the_sweep_that_diverges_is_not_chosen_and_told_and_all_of_them_are_an_error(features):
    x, y, test_x, test_y = features
    found = sweep(x, y, test_x, test_y, Settings((0.1, 1e308), epochs=2, batch_size=50))
    assert found.rate == 0.1 and found.held_out[1e308] is None
    with pytest.raises(UserError, match="diverge"):
        sweep(x, y, test_x, test_y, Settings((1e308,), epochs=2, batch_size=50))
    with pytest.raises(UserError, match="larger than the 540 training rows"):
        sweep(x, y, test_x, test_y, Settings(batch_size=600))


def test_a_tally_counts_as_a_loop_does_whatever_the_batches_and_ranks(pool):
    scores = pool.run(3, tallied)
    logits, labels = answers()
    order = logits.argsort(1, descending=True)
    top5 = sum(int(label) in order[n, :5].tolist() for n, label in enumerate(labels)) / 40
    assert scores[0] == scores[1] == scores[2] and scores[0].top5 == pytest.approx(top5)
    assert scores[0].top1 == pytest.approx(sum(int(order[n, 0]) == int(label) for n, label in enumerate(labels)) / 40)
    assert scores[0].per_class[8] is None and scores[0].confusion[8] == [0] * 9


def answers():
    draws = torch.Generator().manual_seed(2)
    return torch.randn(40, 9, generator=draws), torch.randint(0, 8, (40,), generator=draws)


def tallied(ranks):
    logits, labels = answers()
    tally = Tally(9, ranks.device)
    for rows in torch.arange(40)[ranks.rank :: ranks.world].split(5):
        tally.add(logits[rows], labels[rows])
    return tally.scores(ranks)


def test_a_fingerprint_sees_every_value_and_its_name():
    net = synthetic.SmallEncoder(4, 4).backbone
    before = fingerprint(net)
    net[1].num_batches_tracked += 1
    assert fingerprint(net) != before
    net[1].num_batches_tracked -= 1
    assert fingerprint(net) == before
