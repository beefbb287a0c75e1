"""A run of the released MoCo carried on: what `export --to moco` writes comes back as the state of the learner, to the last bit."""

import pytest
import torch

from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.export import export
from moco_ray.learner import Learner
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.released import released_state
from moco_ray.train import train
from tests.synthetic import Log, batches, identical, largest_difference
from tests.test_export import stored

OVERRIDES = [
    "encoder.backbone=resnet18", "encoder.feature_dim=16", "batch.global_batch_size=16", "batch.bn_group_size=4", "contrast.queue_keys=40",
    "augment.image_pixels=32", "schedule.steps=30", "run.memory_format=contiguous",
]  # fmt: skip
ROWS = 64  # 4 steps an epoch


@pytest.fixture(scope="module", params=["mlp", "linear"])
def trained(request, tmp_path_factory):
    """A learner after two epochs, and its released file."""
    recipe = Recipe.of_overrides([*OVERRIDES, f"encoder.head={request.param}"])
    plan, learner = Plan(recipe, ROWS), Learner.new(recipe)
    rows = (batch for _, batch in zip(range(8), batches(plan, Ranks()), strict=False))
    with pytest.raises(StopIteration):  # no more rows
        train(learner, rows, plan, Ranks(), Log().outputs())
    assert learner.step == 8
    learner.optimizer.param_groups[0]["lr"] = recipe.optimizer.learning_rate  # the loop sets it anew at each step
    folder = tmp_path_factory.mktemp("released")
    stored(Store(str(folder / "run")), (learner, recipe), (8,))
    (folder / "run" / "plan.json").write_text('{"steps_per_epoch": 4}')
    export(str(folder / "run"), "moco", str(folder / "run.pth.tar"))
    return learner, plan, str(folder / "run.pth.tar")


def test_encoders_queue_momentum_and_step_come_back_and_the_next_steps_are_the_same(trained):
    learner, plan, file = trained
    state = released_state(file, plan)
    assert identical(state, learner.state_dict()), largest_difference(state, learner.state_dict())  # ages of the keys too
    ends = []
    for begin in (state, learner.state_dict()):
        one = Learner.new(plan.recipe)
        one.load_state_dict(begin)
        log = Log()
        rows = (batch for _, batch in zip(range(3), batches(plan, Ranks(), 8), strict=False))
        with pytest.raises(StopIteration):
            train(one, rows, plan, Ranks(), log.outputs())
        ends.append(one.state_dict())
    assert identical(*ends) and ends[0]["step"] == 11


def test_what_does_not_fit_is_refused_with_its_cure(trained, tmp_path):
    learner, plan, file = trained
    held = torch.load(file, weights_only=True)

    def other(*overrides: str, rows: int = ROWS) -> Plan:
        return Plan(Recipe.of_overrides([*OVERRIDES, f"encoder.head={plan.recipe.encoder.head}", *overrides]), rows)

    with pytest.raises(UserError, match="give contrast.queue_keys=40 encoder.feature_dim=16"):
        released_state(file, other("contrast.queue_keys=48"))
    with pytest.raises(UserError, match="give the recipe its encoder.backbone"):
        released_state(file, other("encoder.backbone=resnet34"))
    with pytest.raises(UserError, match="of epoch 2, step 8 of this data set; the recipe's run has 8 steps"):
        released_state(file, other("schedule.steps=8"))
    torch.save(held["state_dict"], tmp_path / "weights.pth")
    with pytest.raises(UserError, match="no whole checkpoint of the released MoCo .*--warm-start"):
        released_state(str(tmp_path / "weights.pth"), plan)
    held["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(3)
    torch.save(held, tmp_path / "odd.pth.tar")
    with pytest.raises(UserError, match="optimizer in .* does not fit its encoder .parameter 0"):
        released_state(str(tmp_path / "odd.pth.tar"), plan)
    with pytest.raises(UserError, match="there is no file"):
        released_state(str(tmp_path / "none"), plan)
