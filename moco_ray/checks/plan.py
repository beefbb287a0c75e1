"""Recipe and data together: what follows from the plan. Arithmetic, without a look at an image or a machine."""

from moco_ray.checks.finding import Finding, failed, mistake, ok, warning
from moco_ray.errors import UserError
from moco_ray.plan import Plan, Workers

USUAL_RATES = (0.1, 4.0)  # times the linear rule; released set-ups for small images lie between
WILD_RATE = 100.0  # times it: 30 is the linear classifier's
GOOD_EFFICIENCY = 0.8


def about_plan(plan: Plan, workers: Workers) -> list[Finding]:
    """All of this file."""
    return [queue(plan), queue_fill(plan), groups(plan), key_momentum(plan), learning_rate(plan), worker_count(plan, workers)]


def queue(plan: Plan) -> Finding:
    """K against the rows, and how much of an epoch the queue remembers."""
    keys, facts, said = plan.recipe.contrast.queue_keys, plan.facts(), plan.concerns().get("queue")
    cure = f"contrast.queue_keys={max(plan.keys_per_step, plan.rows // 10)} or less"
    if keys >= plan.rows:
        return failed("queue", said, cure)
    if said:
        return warning("queue", said, cure)
    return ok("queue", f"{keys:,} keys for {plan.rows:,} rows, replaced every {facts['queue_turn_epochs']:.2g} epochs")


def queue_fill(plan: Plan) -> Finding:
    """Whether the run is long enough to fill the queue with keys of its own."""
    turn, said = plan.facts()["queue_turn_steps"], plan.concerns().get("queue_fill")
    cure = f"a longer schedule, or contrast.queue_keys={max(plan.keys_per_step, plan.total_steps * plan.keys_per_step // 10)} or less"
    if plan.total_steps < turn:
        return failed("queue fill", said, cure)
    if said:
        return warning("queue fill", said, cure)
    return ok("queue fill", f"full after {turn:,.0f} of {plan.total_steps:,} steps")


def groups(plan: Plan) -> Finding:
    """How many BatchNorm groups the shuffle has to mix."""
    batch, said = plan.recipe.batch, plan.concerns().get("groups")
    cure = f"batch.bn_group_size={max(2, batch.global_batch_size // 8)}, an eighth of the batch"
    if plan.groups == 1:
        return failed("BatchNorm groups", said, cure)
    if said:
        return warning("BatchNorm groups", said, cure)
    over = batch.shuffle_domain_groups
    if 0 < over < 8:
        return warning("BatchNorm groups", f"keys are shuffled over {over} of the {plan.groups} groups: statistics correlate by 1/{over}", "batch.shuffle_domain_groups=8 or 0")
    return ok("BatchNorm groups", f"{plan.groups} of {batch.bn_group_size} rows, shuffled over {over or plan.groups}")


def key_momentum(plan: Plan) -> Finding:
    momentum, said = plan.recipe.contrast.key_momentum, plan.concerns().get("key_momentum")
    if momentum == 1.0:
        return failed("key momentum", "contrast.key_momentum 1: the key encoder never moves", "contrast.key_momentum=0.999, the published value")
    if said:
        return warning("key momentum", said, "contrast.key_momentum=0.99 or 0.999")
    return ok("key momentum", f"{momentum:g}")


def learning_rate(plan: Plan) -> Finding:
    """Against the linear rule on the published 0.03 at batch 256 (Goyal et al. 2017 for the rule, He et al. 2019 for the rate), which is of SGD."""
    rate, rule = plan.recipe.optimizer.learning_rate, plan.facts().get("published_learning_rate")
    if rule is None:
        return optimizer(plan)
    found = f"{rate:g}, {rate / rule:.3g} times the linear rule's {rule:.3g} (0.03 at batch 256)"
    cure = f"optimizer.learning_rate={rule:.3g}; nothing scales it by itself"
    if rate > WILD_RATE * rule:
        return failed("learning rate", found, cure)
    return ok("learning rate", found) if USUAL_RATES[0] <= rate / rule <= USUAL_RATES[1] else warning("learning rate", found, cure)


def optimizer(plan: Plan) -> Finding:
    """Another than the released one: what its rate ought to be is not published."""
    settings, said = plan.recipe.optimizer, plan.concerns().get("optimizer")
    if said:
        return warning("learning rate", said, "optimizer.decay_norm_and_bias=false")
    return ok("learning rate", f"{settings.learning_rate:g} of {settings.name}, which MoCo v1 and v2 have no published one for: try several")


def worker_count(plan: Plan, workers: Workers) -> Finding:
    """Workers against BatchNorm groups, and the time that is lost when groups cannot be dealt out evenly."""
    try:
        plan.refuse_world(workers.most)
    except UserError as error:
        return mistake("workers", error)
    share = plan.efficiency(workers.most)
    found = f"{workers.most} for {plan.groups} groups: {share:.0%} of their time is used"
    if share >= GOOD_EFFICIENCY:
        return ok("workers", found)
    better = max(world for world in range(1, workers.most + 1) if plan.groups % world == 0)
    return warning("workers", found, f"--workers {better}, which deals the groups out evenly")
