"""What is done while a step computes changes no bit of what is computed: the next batch's exchange, and the gather of the keys.

float32, plain gloo, worlds 1 to 3. Then that it is so in fact, and that failures in the middle of it end as before.
"""

import time
from unittest import mock

import pytest
import torch

from moco_ray.data.augment import colour_stage
from moco_ray.errors import NonFinite, UserError
from moco_ray.meter import slow_rank
from moco_ray.method.contrast import info_nce
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.restarts import one_line
from moco_ray.train import train
from tests import synthetic

STEPS, SAVE = 12, 5
VARIANTS = {
    "plain": {},
    "two groups a pass": {"run": {"groups_per_forward": 2}},
    "symmetric, one group a pass": {"contrast": {"symmetric": True}, "run": {"groups_per_forward": 1}},
}


def recipe_of(changes: dict) -> Recipe:
    base = {
        "encoder": {"precision": "float32"},
        "optimizer": {"learning_rate": 0.05} | changes.get("optimizer", {}),
        "schedule": {"steps": STEPS},
        "run": {"checkpoint_every_steps": SAVE, "log_every_steps": 3, "dictionary_every_steps": 4} | changes.get("run", {}),
    }
    return synthetic.recipe(**{**changes, **base})


def carry(ranks: Ranks, changes: dict, overlap: bool, state: dict | None = None, new=synthetic.small_learner):
    """Train as `ranks` from the beginning or from a state; the records, the states saved, and the last one."""
    torch.set_num_threads(1)
    recipe, log = recipe_of(changes), synthetic.Log()
    plan, learner = synthetic.plan(recipe), new(recipe)
    if state is not None:
        learner.load_state_dict(state)
    train(learner, synthetic.batches(plan, ranks, learner.step), plan, ranks, log.outputs(), overlap)
    return log.entries, log.states, synthetic.copy_state(learner.state_dict())


@pytest.mark.parametrize("variant,world", [("plain", 1), ("plain", 2), ("plain", 3), ("two groups a pass", 2), ("symmetric, one group a pass", 3)])
def test_overlap_changes_no_bit_and_neither_does_a_resume_in_the_middle(pool, variant, world):
    apart = pool.run(world, carry, VARIANTS[variant], False)
    together = pool.run(world, carry, VARIANTS[variant], True)
    resumed = pool.run(world, carry, VARIANTS[variant], True, apart[0][1][SAVE])
    for (entries, states, last), (expected, expected_states, expected_last), (rest, _, resumed_last) in zip(together, apart, resumed, strict=True):
        assert entries == expected and len(entries) == 6
        assert sorted(states) == [5, 10, 12] and all(synthetic.identical(states[step], expected_states[step]) for step in states)
        assert synthetic.identical(last, expected_last) and synthetic.identical(resumed_last, expected_last)
        assert rest[-1] == entries[-1]
    assert max(e["loss"] for e in apart[0][0]) - min(e["loss"] for e in apart[0][0]) > 0.05


def test_with_several_gradient_buckets_it_changes_no_bit_either(pool):
    apart, together = (pool.run(3, carry, {}, overlap, None, synthetic.wide_learner) for overlap in (False, True))
    assert synthetic.identical(together[2][2], apart[2][2])


# --- that it is so in fact -----------------------------------------------------------------------------------------


def story(ranks: Ranks, overlap: bool, start: int = 0) -> list[str]:
    """What happened in which order: batches asked for, and steps completed."""
    torch.set_num_threads(1)
    recipe, told = recipe_of({}), []
    plan, learner, log = synthetic.plan(recipe), synthetic.small_learner(recipe), synthetic.Log()
    learner.step = start

    def batches():
        for step, batch in enumerate(synthetic.batches(plan, ranks, start), start):
            told.append(f"batch {step}")
            yield batch
        told.append("beyond the end")
        yield batch

    def completed(step: int) -> bool:
        told.append(f"step {step - 1}")
        return False

    train(learner, batches(), plan, ranks, log.outputs()._replace(completed=completed), overlap)
    return told


@pytest.mark.parametrize("world,overlap,early", [(1, True, False), (2, False, False), (2, True, True)])
def test_the_next_batch_is_begun_before_a_step_where_there_are_other_ranks_and_none_beyond_the_last(pool, world, overlap, early):
    for told in pool.run(world, story, overlap):
        assert sorted(told) == sorted([f"{what} {step}" for step in range(STEPS) for what in ("batch", "step")])
        for step in range(STEPS - 1):
            assert (told.index(f"batch {step + 1}") < told.index(f"step {step}")) == early
    assert pool.run(world, story, overlap, STEPS - 1)[0] == [f"batch {STEPS - 1}", f"step {STEPS - 1}"]


def waits(ranks: Ranks, where: str) -> list[list[float]]:
    """Train while rank 1 takes 0.2 s longer somewhere in each step; the shares of their time that ranks wait for images, and for others."""
    torch.set_num_threads(1)
    recipe = recipe_of({})
    plan, learner, log, times = synthetic.plan(recipe), synthetic.small_learner(recipe), synthetic.Log(), {}
    late = 0.2 if ranks.rank == 1 else 0.0

    def batches():
        for batch in synthetic.batches(plan, ranks):
            time.sleep(late if where == "input" else 0)
            yield batch

    def slowly(*arguments):
        time.sleep(late if where == "forward" else 0)
        return info_nce(*arguments)

    def completed(step: int) -> bool:
        times[step] = (time.perf_counter(), ranks.waits.seconds)
        return False

    with mock.patch("moco_ray.train.info_nce", slowly):
        train(learner, batches(), plan, ranks, log.outputs()._replace(completed=completed))
    (began, before), (ended, after) = times[3], times[STEPS - 1]  # the last step has no batch behind it
    return ranks.gather(torch.tensor([[0.0, (after - before) / (ended - began)]]), [1] * ranks.world).tolist()


@pytest.mark.parametrize("where", ["input", "forward"])
def test_a_slow_rank_is_seen_though_the_others_wait_for_it_in_their_backward_pass(pool, where):
    found = slow_rank(pool.run(2, waits, where)[0])
    assert found and found.rank == 1 and found.others_wait_share > 0.4


# --- failures ------------------------------------------------------------------------------------------------------


def blow_up(ranks: Ranks, overlap: bool):
    """Train until a step is not finite: the message, and the state then."""
    torch.set_num_threads(1)
    recipe = recipe_of({})
    plan, learner, log = synthetic.plan(recipe), synthetic.small_learner(recipe), synthetic.Log()

    def poisoned(crops, positions, view, seed, epoch, *rest):
        x = colour_stage(crops, positions, view, seed, epoch, *rest)
        if view == 0 and epoch == 0:
            x[torch.from_numpy(positions == 7 * 32 + 3)] = float("nan")  # of step 7, which no record follows at once
        return x

    with mock.patch("moco_ray.ahead.colour_stage", poisoned), pytest.raises(NonFinite) as raised:
        train(learner, synthetic.batches(plan, ranks), plan, ranks, log.outputs(), overlap)
    return str(raised.value), synthetic.copy_state(learner.state_dict())


@pytest.mark.parametrize("world", [1, 3])
def test_a_step_that_is_not_finite_is_refused_alike(pool, world):
    apart, together = (pool.run(world, blow_up, overlap) for overlap in (False, True))
    for (told, state), (expected, expected_state) in zip(together, apart, strict=True):
        assert told == expected and "step 7 (epoch 0)" in told
        assert state["step"] == 7 and synthetic.identical(state, expected_state)


def ill(ranks: Ranks, how: str, overlap: bool):
    """Train while rank 1 has no batch of step 5, or sleeps instead; what each rank ends with, after which step and how long."""
    torch.set_num_threads(1)
    recipe = recipe_of({})
    plan, learner, log = synthetic.plan(recipe), synthetic.small_learner(recipe), synthetic.Log()

    def batches():
        for step, batch in enumerate(synthetic.batches(plan, ranks)):
            if step == 5 and ranks.rank == 1:
                if how == "an error":
                    raise UserError("the image of step 5 is gone")
                time.sleep(2.5)
            yield batch

    def completed(step: int) -> bool:
        if step == 2:
            ranks.expect_answers_within(0.5)
        return False

    began, failure = time.monotonic(), None
    try:
        train(learner, batches(), plan, ranks, log.outputs()._replace(completed=completed), overlap)
    except (UserError, RuntimeError) as error:
        failure = str(error)
    return failure, learner.step, sorted(log.states), time.monotonic() - began


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_without_its_next_batch_ends_after_the_step_before_and_the_others_do_not_hang(pool, overlap):
    healthy, ill_one = pool.run(2, ill, "an error", overlap)
    assert "the image of step 5 is gone" in ill_one[0]
    for failure, step, saved, seconds in (healthy, ill_one):
        assert failure and step == 5 and saved == [5] and seconds < 15  # the step before was finished, and its checkpoint written


@pytest.mark.parametrize("overlap", [False, True])
def test_a_silent_rank_is_given_up_in_time_though_an_exchange_is_under_way(pool, overlap):
    healthy, _ = pool.run(2, ill, "silence", overlap)
    assert healthy[0] and healthy[3] < 2.5  # while the other still slept


def test_a_lost_peer_is_recognised_behind_the_frames_of_a_callback():
    lost = "Got the following error when running the callback: RuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]:3235. GLHF!"
    assert one_line(RuntimeError(f"{lost}\n\n\nAt:\n  /torch/default_hooks.py(31): <lambda>\n")) == "another worker was lost"
    assert one_line(RuntimeError("first\nlast")) == "last"


# --- gradients in bfloat16 -----------------------------------------------------------------------------------------


def test_gradients_in_bfloat16_are_rounded_between_ranks_and_not_on_one():
    changes = {"optimizer": {"gradient_reduction": "bfloat16"}}
    assert recipe_of(changes).fingerprint() != recipe_of({}).fingerprint()
    assert carry(Ranks(), changes, True)[0] == carry(Ranks(), {}, True)[0]


def test_losses_with_gradients_in_bfloat16_stay_near_those_without(pool):
    exact, rounded = (
        pool.run(2, carry, {"optimizer": {"gradient_reduction": kind}}, True) for kind in ("exact", "bfloat16")
    )
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(exact[0][0], rounded[0][0], strict=True)]
    assert 0 < max(differences) < 0.02
    assert synthetic.identical(rounded[0][2], rounded[1][2])


def test_a_recipe_from_before_the_field_keeps_its_fingerprint():
    assert Recipe.parse({"schedule": {"steps": 5}}).fingerprint() == "aa1dfaf197a3a906"
