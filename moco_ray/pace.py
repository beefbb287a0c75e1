"""How long a run takes yet, from its own lines: one answer for the log (progress.py) and for `moco-ray watch` (frame.py).

Pure. Not responsible for where the lines come from, nor for how the answer is said.
"""

from collections.abc import Sequence
from typing import Any

from moco_ray.plan import Plan

RATE_RECORDS = 10  # of which the middle is the speed now


def seconds_left(plan: Plan, training: Sequence[dict[str, Any]], step: int) -> float | None:
    """From `step` to the last at the speed of now, evaluations and checkpoints not counted; None before there is a speed.

    `training` are lines of metrics.jsonl with a loss, in order. The speed is the middle one of the last ten; those of an
    attempt before the last one do not count, for it may have had other workers.
    """
    newest = training[-RATE_RECORDS:]
    rates = sorted(e["images_per_second"] for e in newest if e.get("attempt") == newest[-1].get("attempt") and e.get("images_per_second", 0) > 0)
    if not rates:
        return None
    return (plan.total_steps - step) * plan.recipe.batch.global_batch_size / rates[len(rates) // 2]
