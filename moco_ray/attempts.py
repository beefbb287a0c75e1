"""The attempts of a run: each start of its group of workers, numbered over the run's whole life.

One small object each, written once and whole: who carries the run, from which step on, with which code. An attempt that
was registered ends what earlier ones may add to the run (checkpoint.py). Not responsible for starting workers, nor
for one driver at a time (lease.py).
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from moco_ray.data.storage import Store
from moco_ray.errors import UserError

FOLDER = "attempts"
READING_THREADS = 16


@dataclass(frozen=True)
class Attempt:
    """One start of the group of workers."""

    number: int  # rises by one
    from_step: int
    workers: int  # world size
    asked: str = ""  # how many the user asked for: "4", or "2:16"
    from_checkpoint: str = ""  # the name of the one that was loaded; "" at the start of a run
    nodes: list[str] = field(default_factory=list)
    code: dict[str, Any] = field(default_factory=dict)  # versions, as run.json has them
    data: str = ""  # where data tasks run
    driver: str = ""  # the node of the driver, and of Ray Train's controller


def register(run: Store, attempt: Attempt) -> None:
    """Write the attempt, before its workers write anything. Raises UserError if its number is taken."""
    name = _name(attempt.number)
    if run.size(name) is not None:
        raise UserError(f"{run.place(name)} is there already: another process carries this run too; stop one of them")
    run.write(name, json.dumps(asdict(attempt), indent=1).encode())


def numbers(run: Store) -> list[int]:
    """The numbers of all registered attempts, rising; one listing."""
    found = (re.fullmatch(r"(\d{6,})\.json", entry.name) for entry in run.below(FOLDER).list())
    return sorted(int(match[1]) for match in found if match)


def all_of(run: Store) -> list[Attempt]:
    """All registered attempts by their numbers. Raises UserError that names one that cannot be read."""
    with ThreadPoolExecutor(READING_THREADS) as threads:
        return list(threads.map(lambda number: _read(run, number), numbers(run)))


def _read(run: Store, number: int) -> Attempt:
    name = _name(number)
    try:
        attempt = Attempt(**json.loads(run.read(name)))
        if attempt.number != number or type(attempt.from_step) is not int:
            raise ValueError(f"it says number {attempt.number!r} and step {attempt.from_step!r}")
    except UserError:
        raise
    except (ValueError, TypeError) as error:  # no JSON, no UTF-8; other fields
        raise UserError(
            f"{run.place(name)} is damaged ({error}), and without it the checkpoints that may be believed are not known; put "
            "it back as it was, or start a new run"
        ) from error
    return attempt


def _name(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"
