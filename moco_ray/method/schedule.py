"""Schedules: pure functions of the step, so that there is no scheduler state to save."""

import math

from moco_ray.plan import Plan


def learning_rate(plan: Plan, step: int) -> float:
    """The learning rate of step 0, 1, ..., total_steps - 1.

    Linear warm-up from base/warmup_steps to the base rate, then half a cosine to zero, or the base rate times
    milestone_factor for every milestone passed. The cosine moves every step; the released code moves it
    every epoch, so that ours starts each epoch equal to theirs and ends it lower.
    """
    schedule, base = plan.recipe.schedule, plan.recipe.optimizer.learning_rate
    if step < schedule.warmup_steps:
        return base * (step + 1) / schedule.warmup_steps
    if schedule.shape == "multistep":
        passed = sum(step >= epoch * plan.steps_per_epoch for epoch in schedule.milestone_epochs)
        return base * schedule.milestone_factor**passed
    done = (step - schedule.warmup_steps) / (plan.total_steps - schedule.warmup_steps)
    return base * 0.5 * (1 + math.cos(math.pi * done))
