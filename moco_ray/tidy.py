"""`moco-ray runs --prune`: what a run no longer needs, found and removed.

Responsible for saying what that is, and for never touching the checkpoint that the next start would load: it is read back before
anything else goes. Metrics and facts are never touched. The run's lease is held meanwhile, so that nobody carries
the run. Not responsible for how checkpoints are read (checkpoint.py) nor for asking (cli_runs.py).
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from moco_ray import checkpoint
from moco_ray.checkpoint import Damaged, Found, Saved
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.lease import Lease
from moco_ray.standing import Standing

LEFT_SECONDS = 3600.0  # after which a half-written file that is no checkpoint's is nobody's: evaluations hold no lease


class Superfluous(NamedTuple):
    """One file that may go."""

    name: str  # relative to the run folder
    bytes: int
    why: str


class Tidying:
    """What may go from one run, found while its lease is held. `kept` says in words what stays."""

    def __init__(self, run: Store, lease: Lease):
        self._run, self._lease = run, lease
        found = checkpoint.survey(run)
        self.good, damaged = _newest_that_reads(run, found)
        self.superfluous = _checkpoints(found, self.good, damaged, Standing.read(run)) + _leftovers(run)
        gone = {one.name for one in self.superfluous}
        steps = [one.step for one in found if one.saved and self.good and one.name != self.good.name and f"{one.name}.pt" not in gone]
        self.kept = f"the checkpoint of step {self.good.step}, which was read back" if self.good else "no checkpoint: there is none"
        self.kept += f", and the best one or those to be evaluated, of step {', '.join(map(str, sorted(steps)))}" if steps else ""

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.superfluous)

    def remove(self) -> None:
        """Remove it: the marker of each checkpoint first. Raises UserError if the run is another's by now, or at the first that stays."""
        for one in self.superfluous:
            self._lease.confirm()
            assert not self.good or not one.name.startswith(f"{self.good.name}."), f"{one.name} is of the last good checkpoint"
            self._run.delete(one.name)


@contextlib.contextmanager
def tidying(run: Store, told: Callable[[str], None]) -> Iterator[Tidying]:
    """Hold the run and find what may go. Raises UserError if it is being carried, or if none of its checkpoints can be read."""
    with Lease.acquire(run, told) as lease:
        yield Tidying(run, lease)


def _newest_that_reads(run: Store, found: list[Found]) -> tuple[Saved | None, dict[str, str]]:
    """The checkpoint that the next start would load, and what is wrong with those before it: name to flaw."""
    damaged: dict[str, str] = {}
    for one in found:
        if not one.believed or "json" not in one.parts:
            continue
        try:
            if one.saved is None:
                raise Damaged.of(run.place(f"{one.name}.pt"), one.flaw, "")
            checkpoint.load(run, one.saved)
            return one.saved, damaged
        except Damaged as error:
            damaged[one.name] = error.cause
    if damaged:
        name, cause = next(iter(damaged.items()))
        raise UserError(f"no checkpoint of {run.place('')} can be read (the newest, {name}: {cause}); nothing is removed: put one back as it was")
    return None, {}


def _checkpoints(found: list[Found], good: Saved | None, damaged: dict[str, str], standing: Standing) -> list[Superfluous]:
    """Everything but the good one, the best one and those that wait for their evaluation; markers before tensors."""
    superfluous = []
    for one in found:
        whole = one.believed and one.saved is not None
        if good and one.name == good.name or (whole and one.name in standing.names and one.name not in damaged):
            continue
        why = (
            f"damaged: {damaged[one.name]}"
            if one.name in damaged
            else "of an attempt that another replaced before that step"
            if not one.believed
            else "never completed"
            if "json" not in one.parts
            else f"damaged: {one.flaw}"
            if one.saved is None
            else "older"
        )
        superfluous += [Superfluous(f"{one.name}.{part}", one.parts[part], why) for part in sorted(one.parts)]
    return superfluous


def _leftovers(run: Store) -> list[Superfluous]:
    """Files that a killed process was writing. Only disks have them: an object is there when it is complete."""
    if not run.is_local:
        return []
    found = []
    for path in sorted(Path(run.place("")).rglob("*.part")):
        facts = path.lstat()
        name = path.relative_to(run.place("")).as_posix()
        if not path.is_symlink() and path.is_file() and (name.startswith(f"{checkpoint.FOLDER}/") or time.time() - facts.st_mtime > LEFT_SECONDS):
            found.append(Superfluous(name, facts.st_size, "left by a process that was killed"))
    return found
