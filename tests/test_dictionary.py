"""The dictionary's health: against slow readings in NumPy, the same for every world size, and of no effect on what is learned."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.data.segment import Segment, Source, content_of, segment_steps
from moco_ray.data.survey import build_manifest
from moco_ray.dictionary import AGES, Dictionary, Duplicates, against_queue
from moco_ray.errors import NonFinite
from moco_ray.method.queue import Queue
from moco_ray.method.shuffle import permutation
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.train import encode_keys, train
from moco_ray.verdicts import judge
from tests import synthetic

B, GROUP, SIZE, WIDTH, T = 24, 4, 90, 6, 0.2
MEASURED = {
    "queue_top1", "fresh_top1", "top1_gap", "step_positive_similarity", "step_similarity", "mate_z", *AGES, "effective_rank", "key_spread",
    "uniformity", "parameter_distance", "weight_norm", "oldest_key_age_steps", "mean_key_age_steps", "oldest_key_age_epochs",
    "mean_key_age_epochs", "queues_equal", "key_moved_share", "own_image_mass", "own_image_keys",
}  # fmt: skip


def unit(draw, *shape):
    values = draw.normal(size=shape)
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def slow_reading(q, keys, queue, steps, slot_rows, rows, step, steps_per_epoch, weights):
    """Each value by its definition, in loops; all arrays float64."""
    own, a, b = [], [], []  # similarities to the own key, to mates, to strangers
    queue_right = fresh_right = own_mass = own_keys = 0.0
    mass = dict.fromkeys(AGES, 0.0)
    by_age = np.argsort(-steps, kind="stable")  # newest first; within a step any order, for a quarter ends between two (below)
    for i in range(B):
        own.append(q[i] @ keys[i])
        fresh = [q[i] @ keys[j] for j in range(B) if j != i]
        for j in range(B):
            if j != i:
                (a if i // GROUP == j // GROUP else b).append(q[i] @ keys[j])
        queued = queue @ q[i]
        fresh_right += own[-1] > max(fresh)
        queue_right += own[-1] > queued.max()
        share = np.exp(queued / T) / np.exp(queued / T).sum()
        for name, part in zip(AGES, np.split(by_age, [SIZE - 3 * SIZE // 4, SIZE - SIZE // 2, SIZE - SIZE // 4]), strict=True):
            mass[name] += share[part].sum() / B
        own_mass += share[slot_rows == rows[i]].sum() / B
        own_keys += (slot_rows == rows[i]).sum() / B
    pairs = [2 - 2 * keys[i] @ keys[j] for i, j in itertools.combinations(range(B), 2)]
    singular = np.linalg.svd(keys, compute_uv=False)
    p = singular / singular.sum()
    (theta_q, theta_k) = weights
    ages = step - steps
    return {
        "queue_top1": queue_right / B,
        "fresh_top1": fresh_right / B,
        "top1_gap": (queue_right - fresh_right) / B,
        "step_positive_similarity": np.mean(own),
        "step_similarity": np.mean(a + b),
        "mate_z": (np.mean(a) - np.mean(b)) / np.std(a + b),
        **mass,
        "effective_rank": np.exp(-(p * np.log(p)).sum()),
        "key_spread": keys.std(0).mean() * np.sqrt(WIDTH),
        "uniformity": np.log(np.mean(np.exp(-2 * np.array(pairs)))),
        "parameter_distance": np.linalg.norm(theta_q - theta_k) / np.linalg.norm(theta_q),
        "weight_norm": np.linalg.norm(theta_q),
        "oldest_key_age_steps": ages.max(),
        "mean_key_age_steps": ages.mean(),
        "oldest_key_age_epochs": ages.max() / steps_per_epoch,
        "mean_key_age_epochs": ages.mean() / steps_per_epoch,
        "queues_equal": 1.0,
        "key_moved_share": 8 / 72,
        "own_image_mass": own_mass,
        "own_image_keys": own_keys,
    }


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("seed", range(3))
def test_every_value_is_what_a_slow_reading_gives(dtype, tolerance, seed):
    draw = np.random.default_rng(seed)
    recipe = synthetic.recipe(
        contrast={"queue_keys": SIZE, "temperature": T}, batch={"global_batch_size": B, "bn_group_size": GROUP}, encoder={"feature_dim": WIDTH}
    )
    centre = unit(draw, WIDTH)  # so that not all choices are wrong, and no value is near its chance
    keys = unit(draw, B, WIDTH) + centre
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    q = keys + 0.35 * draw.normal(size=keys.shape)
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    queue = Queue(SIZE, WIDTH, 0, dtype=dtype)
    for step in range(5, 45):  # three keys a step: by slot as by step
        queue.enqueue(torch.from_numpy(unit(draw, 3, WIDTH) - 0.3 * centre).to(dtype), step)
    # Exact ages: a step's three keys never straddle a quarter by accident of the sort.
    order = (np.arange(SIZE) - queue.position) % SIZE
    exact = queue.steps.numpy() * 1000 + order
    slot_rows, rows = draw.integers(0, 40, SIZE), draw.integers(0, 40, B)
    f_q, f_k = nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)
    dictionary = Dictionary(synthetic.plan(recipe), Ranks(), lambda queue: torch.from_numpy(slot_rows))
    held = [torch.from_numpy(x).to(dtype) for x in (q, keys)]
    dictionary.measure(45, *held, torch.from_numpy(rows), f_q, f_k, queue)
    weights = [np.concatenate([p.detach().double().numpy().ravel() for p in f.parameters()]) for f in (f_q, f_k)]
    with torch.no_grad():
        f_k.bias += 1  # 8 of 72 values
    dictionary.moved(f_k)
    values = dictionary.take()
    arrays = [x.double().numpy() for x in (*held, queue.keys)]
    slow = slow_reading(*arrays, exact, slot_rows, rows, 45_000, synthetic.plan(recipe).steps_per_epoch, weights)
    assert values.keys() == slow.keys() == MEASURED
    for name in MEASURED - {n for n in MEASURED if "age_" in n}:
        assert values[name] == pytest.approx(slow[name], abs=tolerance, rel=tolerance), name
    assert 0 < values["fresh_top1"] < 1 or 0 < values["queue_top1"] < 1
    ages = 45 - queue.steps.double().numpy()
    assert values["oldest_key_age_steps"] == ages.max() == 30 and values["mean_key_age_steps"] == pytest.approx(ages.mean())
    assert values["mean_key_age_epochs"] == pytest.approx(ages.mean() / synthetic.plan(recipe).steps_per_epoch)
    assert dictionary.take() == {}


def rows_of_slots(plan, queue):
    """synthetic.batches' rows are their positions, and a step's keys lie in the order of its rows."""
    age = (queue.position - 1 - np.arange(len(queue))) % len(queue)
    step = (queue.steps.max().item() - age // plan.keys_per_step) % plan.steps_per_epoch
    size = plan.recipe.batch.global_batch_size
    rows = step * size + (size - 1 - age % size)
    return torch.from_numpy(np.where(queue.steps.numpy() >= 0, rows, -1))


def carry(ranks, changes, wrong_queue=-1, until=None):
    """Train as `ranks`, with the queue of rank `wrong_queue` altered after step 5; entries and the last state."""
    recipe = synthetic.recipe(**changes)
    torch.set_num_threads(1)
    log, plan, learner = synthetic.Log(), synthetic.plan(recipe), synthetic.small_learner(recipe)

    def completed(step):
        if step == 5 and ranks.rank == wrong_queue:
            learner.queue.keys[7, 3] += 1e-9
        return False

    outputs = log.outputs()._replace(completed=completed, rows_of_slots=lambda queue: rows_of_slots(plan, queue))
    train(learner, synthetic.batches(plan, ranks), plan, ranks, outputs)
    return log.entries, synthetic.copy_state(learner.state_dict())


CHANGES = {"run": {"dictionary_every_steps": 2}, "contrast": {"queue_keys": 330}}  # 9 steps and a bit: an epoch's rows and some
SYMMETRIC = {"run": {"dictionary_every_steps": 3}, "contrast": {"queue_keys": 330, "symmetric": True}}


@pytest.mark.parametrize("changes,worlds", [(CHANGES, (2, 3, 4)), (SYMMETRIC, (3,))])
def test_the_number_of_ranks_changes_no_value(pool, changes, worlds):
    (alone, _), *_ = pool.run(1, carry, changes)
    measured = [entry for entry in alone if "fresh_top1" in entry]
    every = changes["run"]["dictionary_every_steps"]
    assert [e["step"] for e in measured] == list(range(every, 21, every))
    assert measured[-1].keys() >= MEASURED and any("drift" in e for e in alone)
    assert "mass_newest" not in measured[0]  # the queue is not full yet
    assert measured[-1]["own_image_keys"] == pytest.approx(1 if changes is CHANGES else 0, abs=0.2)
    for world in worlds:
        (entries, _), *_ = pool.run(world, carry, changes)
        for entry, other in zip(alone, entries, strict=True):
            assert entry.keys() == other.keys()
            for name in entry:
                tolerance = 1e-6 if name == "effective_rank" else 1e-8  # a root of rounding where keys are few
                assert other[name] == pytest.approx(entry[name], abs=tolerance), (world, name, entry["step"])


def test_a_queue_that_differs_on_one_rank_is_seen_on_all_and_is_a_verdict_at_the_next_look(pool):
    answers = pool.run(3, carry, CHANGES, 1)
    for entries, _ in answers:
        seen = {e["step"]: e["queues_equal"] for e in entries if "queues_equal" in e}
        assert [step for step, equal in seen.items() if not equal] == [6, 8, 10]  # then step 10 has written over it
        raised = judge(entries, synthetic.plan(synthetic.recipe(**CHANGES)))
        assert (raised[0].step, raised[0].name) == (6, "queues_differ")
        assert {one.name for one in raised[1:]} <= {"false_negatives", "queue_not_filled"}  # K is more than the rows, and ten steps of twenty


def test_looking_changes_nothing_of_what_is_learned():
    changes = {**CHANGES, "batch": {"bn_group_size": 8}}
    _, state = carry(Ranks(), changes)
    _, unseen = carry(Ranks(), changes | {"run": {"dictionary_every_steps": 0}})
    assert synthetic.identical(state, unseen)


def test_keys_that_are_not_finite_stop_the_run_in_its_own_words():
    recipe = synthetic.recipe(run={"dictionary_every_steps": 1})
    plan, learner, log = synthetic.plan(recipe), synthetic.small_learner(recipe), synthetic.Log()
    with torch.no_grad():
        next(learner.f_k.parameters()).fill_(float("nan"))
    with pytest.raises(NonFinite, match="step 0 "):
        train(learner, synthetic.batches(plan, Ranks()), plan, Ranks(), log.outputs())


@pytest.mark.parametrize("momentum", [0.999, 0.5])
def test_drift_is_the_cosine_of_stored_keys_and_the_same_images_encoded_as_they_leave(momentum):
    recipe = synthetic.recipe(contrast={"queue_keys": 128, "key_momentum": momentum}, run={"dictionary_every_steps": 1}, optimizer={"learning_rate": 0.1})
    plan, learner, log, kept = synthetic.plan(recipe), synthetic.small_learner(recipe), synthetic.Log(), {}

    def completed(step):
        kept[step] = copy.deepcopy(learner.f_k), learner.queue.keys.clone(), learner.queue.steps.clone()
        return False

    train(learner, synthetic.batches(plan, Ranks()), plan, Ranks(), log.outputs()._replace(completed=completed))
    drifts = {entry["step"]: entry["drift"] for entry in log.entries if "drift" in entry}
    assert list(drifts) == [4, 8, 12, 16, 20]  # kept at steps 0, 4, ..; 128 keys are four steps
    for step, drift in drifts.items():
        began = step - 4
        rows = permutation(recipe.run.seed, began, plan.groups, 4)[:4]
        stored = kept[began + 1][1][kept[began + 1][2] == began][rows]
        again = encode_keys(kept[step][0], list(itertools.islice(synthetic.batches(plan, Ranks()), 20))[began], plan, Ranks(), (began, 0))[rows]
        assert drift == pytest.approx((stored * again).sum(1).mean().item(), abs=1e-9)
    assert all(d > 0.98 for d in drifts.values()) if momentum == 0.999 else min(drifts.values()) < 0.98


def test_copies_are_counted_by_their_bytes():
    images = [bytes([n % 251]) * 500 + bytes([n // 251, n % 7]) for n in range(400)]
    copies = [*images, *images[:20]]
    contents = [content_of(image, 1) for image in copies]
    assert len(set(contents)) == 400 and min(contents) > 0 and max(contents) < 2**63
    duplicates, rows = Duplicates(), list(enumerate(contents))
    draw = np.random.default_rng(0)
    for part in np.array_split(draw.permutation(420), 9):
        share = duplicates.share([(rows[n][1], rows[n][0]) for n in part])
    assert share == pytest.approx(20 / 420)
    assert duplicates.share([(content, row) for row, content in rows]) == share  # another epoch brings nothing new
    sampled = [content_of(image, 4) for image in copies]  # all copies of an image, or none
    assert 50 < sum(content > 0 for content in sampled) < 160 and sampled[400:] == sampled[:20]


def test_bytes_are_hashed_in_every_tenth_epoch_and_an_image_has_one_hash(tmp_path):
    drawn_prototypes(tmp_path, rows=64, test_rows=20)
    recipe = Recipe.parse({"schedule": {"epochs": 30}, "augment": {"image_pixels": 8}, "batch": {"global_batch_size": 32, "bn_group_size": 8}})
    manifest = build_manifest(str(tmp_path / "train"), "image")
    source = Source(manifest, recipe, Plan(recipe, manifest.rows))
    hashes = []
    for epoch in (0, 1, 9, 10):
        steps = list(segment_steps(source, range(4), Segment(epoch, 0, 2)))
        row, content = (np.concatenate([step[name] for step in steps]) for name in ("row", "content"))
        hashes.append(dict(zip(row.tolist(), content.tolist(), strict=True)))
    assert len(set(hashes[0].values())) == 64 and 0 not in hashes[0].values()
    assert hashes[3] == hashes[0] and not any(hashes[1].values()) and not any(hashes[2].values())


@pytest.mark.parametrize("temperature", [0.005, 0.0299])
def test_the_softmaxs_mass_does_not_vanish_at_low_temperatures(temperature):
    draw = np.random.default_rng(0)
    q, k = (torch.from_numpy(unit(draw, B, 32)).float() for _ in range(2))
    queue, rows = Queue(4000, 32, 0), torch.arange(B)
    sums = against_queue(q, k, queue, temperature, torch.arange(4000), rows)
    weights = torch.softmax(q.double() @ queue.keys.double().T / temperature, 1)  # B,K; slot 0 is the oldest
    for name, part in zip(AGES, reversed(weights.split(1000, 1)), strict=True):
        assert sums[name].item() == pytest.approx(part.sum().item(), rel=1e-3)
