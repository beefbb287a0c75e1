"""The verdicts on a run as its driver keeps them: across drivers, each told once, and health.json.

Not responsible for the conditions (verdicts.py), nor for the lines, the log and TensorBoard (monitor.py, desk.py).
"""

import json
import os
from pathlib import Path
from typing import Any

from moco_ray.plan import Plan
from moco_ray.verdicts import Verdict, Watch

HEALTH = "health.json"


class Health:
    """Of one run. What earlier drivers saw is gone through again, and what they told is not told anew."""

    def __init__(self, folder: Path, plan: Plan, entries: list[dict[str, Any]], told: list[dict[str, Any]]):
        """`entries`: the records so far; `told`: events of kind "verdict" so far."""
        self._path, self._watch = folder / HEALTH, Watch(plan)
        names = {event.get("name") for event in told}
        # Of a run that was stopped for good reasons of its own, no record says so.
        self._watch.verdicts += [Verdict(*(event[key] for key in Verdict._fields)) for event in told if event.keys() >= set(Verdict._fields)]
        self._untold = [verdict for entry in entries for verdict in self._watch.look(entry) if verdict.name not in names]

    def look(self, entry: dict[str, Any]) -> list[Verdict]:
        """What is to be told after one more record."""
        raised, self._untold = [*self._untold, *self._watch.look(entry)], []
        return raised

    def stopped_not_finite(self, step: int, why: str) -> list[Verdict]:
        """The same of a run that stopped because a loss or gradient was not finite."""
        return self._watch.stopped_not_finite(step, why)

    def write(self) -> None:
        """health.json as of the last record. Raises OSError."""
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._watch.health(), indent=1))
        os.replace(part, self._path)
