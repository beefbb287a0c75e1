"""What two steps on every worker told: loss, queues, leak, memory. Judges; takes no step (trial.py)."""

import math

import numpy as np

from moco_ray.checks.finding import Finding, counted, failed, ok, sized, skipped, warning
from moco_ray.plan import Plan
from moco_ray.trial import Trial

NAMES = ("one step", "queues equal", "batch norm leak", "memory")
LOSS_MARGIN = 0.5  # nats, beyond the two bounds
FULL, NEARLY_FULL = 0.95, 0.8  # of the memory


def about_step(trial: Trial, plan: Plan) -> list[Finding]:
    return [loss(trial, plan), queues(trial), leak(trial, plan), memory(trial)]


def not_taken(why: str) -> list[Finding]:
    return [skipped(name, why) for name in NAMES]


def broken(why: str, cure: str) -> list[Finding]:
    """The step failed: nothing is known of what comes after it."""
    return [failed(NAMES[0], why, cure), *(skipped(name, "the step failed") for name in NAMES[1:])]


def loss(trial: Trial, plan: Plan) -> Finding:
    """The first loss against what an untrained network must have: its queue is noise, and its positives are as similar as they are."""
    low, high = first_loss(plan, trial.positive_similarity)
    rate = plan.recipe.batch.global_batch_size / trial.step_seconds
    found = (
        f"on {counted(trial.world, 'worker')}: loss {trial.loss:.2f} (an untrained network: {low:.2f} to {high:.2f}), "
        f"{trial.step_seconds:.3g} s a step, {rate:,.0f} images/s without waiting for them; the first came after {trial.wait_seconds:.1f} s"
    )
    if trial.bad_rows:
        found += f"; {trial.bad_rows} images were replaced"
    if not low - LOSS_MARGIN <= trial.loss <= high + LOSS_MARGIN:
        return failed(NAMES[0], found, "see that data.*, augment.mean and augment.std fit the images; otherwise this is a fault in moco_ray")
    return ok(NAMES[0], found)


def first_loss(plan: Plan, positive_similarity: float) -> tuple[float, float]:
    """Bounds of the loss against K random unit vectors, for a query whose key is so similar.

    log(1 + K·M·exp(-s/T)), where M, the mean of exp(q·k/T) over the queue, is at least 1 (Jensen; the mean of q·k is 0) and its
    logarithm is in the mean at most that of the expectation over the sphere in C dimensions.
    """
    contrast, dim = plan.recipe.contrast, plan.recipe.encoder.feature_dim
    angle = (np.arange(20_000) + 0.5) * (math.pi / 20_000)
    weight = np.sin(angle) ** (dim - 2)  # density of the angle to a random unit vector
    exponent = np.cos(angle) / contrast.temperature
    mean = exponent.max() + math.log(float((weight * np.exp(exponent - exponent.max())).sum() / weight.sum()))
    rest = math.log(contrast.queue_keys) - positive_similarity / contrast.temperature
    return tuple(float(np.logaddexp(0.0, rest + more)) for more in (0.0, mean))


def queues(trial: Trial) -> Finding:
    if trial.queues_equal:
        return ok(NAMES[1], f"the dictionaries of {trial.world} ranks are equal bit for bit" if trial.world > 1 else "one rank")
    return failed(
        NAMES[1],
        "the ranks hold different dictionaries after two steps",
        "let the workers be of one kind (`versions` above; GPUs of one model); memory of a machine may be faulty",
    )


def leak(trial: Trial, plan: Plan) -> Finding:
    """Which keys moved when one image of the batch was altered."""
    found, groups = trial.leak, plan.recipe.batch.shuffle_domain_groups or plan.groups
    if plan.groups == 1:
        return skipped(NAMES[2], "one BatchNorm group: there is nothing to shuffle against")
    told = f"one altered image moves {found.moved} keys, {found.of_own_group} of them of its own query group of {found.group_rows}"
    cure = "this is a fault in moco_ray or in a changed copy of it: the shuffle (method/shuffle.py) must mix the groups"
    if found.spreads:
        return failed(NAMES[2], f"{told}: keys of other BatchNorm groups move too", cure)
    if found.leaks:
        return failed(NAMES[2], f"batch norm leaks: {told}, where the shuffle over {groups} groups allows {found.allowed}", cure)
    if found.moved < 2:
        return warning(NAMES[2], f"{told}: nothing is seen of BatchNorm", "see that the images are not all of one colour")
    return ok(NAMES[2], f"{told}: the share of a shuffle over {groups} groups (at most {found.allowed})")


def memory(trial: Trial) -> Finding:
    where, peak, total = trial.memory
    found = f"{sized(peak)} of {sized(total)} at the peak, on {where}"
    cure = "run.groups_per_forward=1 computes the same in less memory; or more workers, or larger machines"
    if peak > FULL * total:
        return failed(NAMES[3], found, cure)
    return warning(NAMES[3], found, cure) if peak > NEARLY_FULL * total else ok(NAMES[3], found)
