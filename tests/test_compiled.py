"""Compiled encoders: the same run, and a state that does not tell."""

import pytest
import torch

from moco_ray.method.encoder import use_float32_of
from moco_ray.ranks import Ranks
from moco_ray.recipe import Encoder
from tests import synthetic


def train_as(ranks: Ranks, compiled: bool, passes: int, until: int | None = None, state: dict | None = None):
    recipe = synthetic.recipe(
        encoder={"compile": compiled}, run={"groups_per_forward": passes, "checkpoint_every_steps": 4, "dictionary_every_steps": 0, "memory_format": "channels_last"}, schedule={"steps": 8}
    )
    log, learner = synthetic.run(ranks, recipe, state, until)
    return log.losses(), synthetic.copy_state(learner.state_dict()), log.states


@pytest.mark.slow
def test_a_run_with_compiled_encoders_has_the_same_losses_and_the_same_state():
    passes = 3  # of 3, 3 and 2 groups: two shapes
    losses, state, _ = train_as(Ranks(), False, passes)
    torch._dynamo.utils.counters.clear()
    compiled, compiled_state, states = train_as(Ranks(), True, passes)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4  # query's and key's, of two shapes: nothing was compiled twice
    assert not torch._dynamo.utils.counters["graph_break"]
    assert compiled == pytest.approx(losses, abs=1e-12)
    assert state.keys() == compiled_state.keys() and synthetic.largest_difference(state, compiled_state) < 1e-10
    on, _, _ = train_as(Ranks(), False, passes, state=states[4])  # and goes on without
    assert on == pytest.approx(losses[4:], abs=1e-12)


@pytest.mark.slow
def test_compiled_encoders_of_several_ranks_have_the_same_losses(pool):
    expected, _, _ = train_as(Ranks(), False, 0)
    for losses, _, _ in pool.run(3, train_as, True, 0):
        assert losses == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("precision,expected", [("float32", "ieee"), ("tf32", "tf32"), ("bfloat16", "ieee")])
def test_a_gpu_convolves_float32_in_tf32_only_where_the_recipe_says_so(precision, expected):
    conv, before = torch.backends.cudnn.conv, torch.backends.cudnn.conv.fp32_precision
    try:
        use_float32_of(Encoder(precision=precision))
        assert conv.fp32_precision == expected
        assert torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")  # the loss's products stay whole
    finally:
        conv.fp32_precision = before


def test_tf32_is_float32_on_a_cpu():
    losses = [synthetic.run(Ranks(), synthetic.recipe(encoder={"precision": p}, schedule={"steps": 3}))[0].losses() for p in ("float32", "tf32")]
    assert losses[0] == losses[1]
