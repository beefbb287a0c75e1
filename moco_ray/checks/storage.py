"""Where the data lie and the run will: credentials, writing, conditional writes, the clock there, room for checkpoints.

Each check asks the storage once. Not responsible for storage itself (data/storage.py) nor for the lease (lease.py).
"""

import contextlib
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from moco_ray.checks.finding import Finding, counted, failed, mistake, ok, sized, skipped, warning
from moco_ray.data.conditional import InS3, OnDisk, conditional
from moco_ray.data.storage import S3_SCHEMES, Store
from moco_ray.errors import UserError
from moco_ray.plan import Plan

REFUSED = "refuses the credentials"  # in the message of a storage that does
TOLERATED_SECONDS, BROKEN_SECONDS = 5.0, 60.0  # between two clocks


def credentials(places: dict[str, Store]) -> tuple[Finding, set[str]]:
    """Whether the storages of a data set and of runs take those of this machine, and which do not.

    `places`: what lies there -> where.
    """
    asked = {what: store for what, store in places.items() if not store.is_local}
    refusals: dict[str, UserError] = {}
    for what, store in asked.items():
        try:
            store.is_file()
        except UserError as error:
            if REFUSED in str(error):  # what else is wrong there is told by the check of that place
                refusals[what] = error
    if refusals:
        return mistake("credentials", next(iter(refusals.values()))), set(refusals)
    if not asked:
        return ok("credentials", "none needed: data and storage are folders"), set()
    return ok("credentials", f"{' and '.join(asked)}: {', '.join(dict.fromkeys(map(kind, asked.values())))}"), set()


def kind(store: Store) -> str:
    """Where the credentials for a place come from."""
    if store.uri.partition("://")[0] not in S3_SCHEMES or "anonymous=true" in store.uri:
        return "none needed" if "anonymous" in store.uri else "those of its fsspec package"
    import botocore.session  # half a second

    found = botocore.session.get_session().get_credentials()
    names = {"env": "environment variables", "shared-credentials-file": "the profile's file", "iam-role": "the machine's role"}
    return names.get(found.method, found.method) if found else "none found"


def writable(storage: Store) -> tuple[list[Finding], float | None]:
    """Write, read back and remove an object; whether writes on a condition are refused; and how far the storage's clock is ahead.

    The last in seconds, None if it tells no time.
    """
    probe, new = storage.below(f"moco-ray-doctor-{uuid.uuid4().hex[:12]}"), _missing(storage)
    content, ahead = uuid.uuid4().bytes * 256, None
    try:
        began = time.time()
        probe.write("probe", content)
        ended = time.time()
        if probe.read("probe") != content:
            return [failed("storage", f"{storage.place('')} gives back other bytes than were written", "use another storage"), _no_writes()], None
        stamp = next((entry.version for entry in probe.list() if entry.name == "probe"), 0) / 1e9
        ahead = outside(stamp, began - 1, ended) if stamp else None  # whole seconds in object storage
        return [ok("storage", f"{storage.place('')}: written, read back and removed"), _conditional(probe)], ahead
    except UserError as error:
        return [mistake("storage", error), _no_writes()], ahead
    finally:
        _remove(probe, new)


@contextlib.contextmanager
def placed(storage: Store) -> Iterator[tuple[Store, str]]:
    """An object that lies in the storage until the block ends, for others to look for: its folder and name. Raises UserError."""
    probe, new = storage.below(f"moco-ray-doctor-{uuid.uuid4().hex[:12]}"), _missing(storage)
    try:
        probe.write("seen", b"1")
        yield probe, "seen"
    finally:
        _remove(probe, new)


def _no_writes() -> Finding:
    return skipped("one driver at a time", "the storage cannot be written")


def _conditional(probe: Store) -> Finding:
    """Whether the second of two writers is refused, as the lease on a run needs it."""
    name, certain = "one driver at a time", conditional(probe, "condition")
    if isinstance(certain, InS3):  # it was tried
        return ok(name, "the storage refuses the second of two writers (conditional writes)")
    if isinstance(certain, OnDisk):
        if certain.replace(b"1", None) and certain.replace(b"2", None) is None:
            return ok(name, "file locks work here; on a disk that machines share, as its locks do")
        return failed(name, "a file that is there was replaced as if it were not", "use another disk, or object storage")
    return warning(
        name,
        "the storage ignores conditional writes: two drivers that start within two seconds may both begin",
        "start a run from one place only, or use a storage with conditional writes",
    )


def _missing(storage: Store) -> list[Path]:
    """Folders on the way to the storage that are not there yet, the innermost first."""
    path = Path(storage.uri)
    return [one for one in (path, *path.parents) if not one.exists()] if storage.is_local else []


def _remove(probe: Store, new: list[Path]) -> None:
    with contextlib.suppress(UserError, OSError):
        if probe.is_local:
            shutil.rmtree(probe.uri, ignore_errors=True)
            for folder in new:
                folder.rmdir()
        else:
            for entry in probe.list():
                probe.delete(entry.name)


def outside(moment: float, began: float, ended: float) -> float:
    """How far a moment lies after `ended` (positive) or before `began` (negative); 0 between them. In seconds."""
    return max(0.0, moment - ended) + min(0.0, moment - began)


def clock(ahead: dict[str, float | None]) -> Finding:
    """This machine's clock against others'. `ahead`: whose -> seconds that it is ahead of ours, None if it tells none."""
    known = {whose: seconds for whose, seconds in ahead.items() if seconds is not None}
    if not known:
        return skipped("clock", "no time is known but this machine's own")
    whose, worst = max(known.items(), key=lambda item: abs(item[1]))
    if abs(worst) <= TOLERATED_SECONDS:
        return ok("clock", f"within {TOLERATED_SECONDS:g} s of {', '.join(known)}")
    found = f"{whose} is {abs(worst):.0f} s {'ahead of' if worst > 0 else 'behind'} this machine"
    cure = "let the machines take their time by NTP (chrony, systemd-timesyncd): signatures of S3 expire, and notices of a machine's end are misread"
    return (failed if abs(worst) > BROKEN_SECONDS else warning)("clock", found, cure)


def disk_space(storage: Store, plan: Plan, encoder_parameters: int) -> Finding:
    """Free space against the checkpoints that a run keeps, and one that is being written."""
    keep = plan.recipe.run.keep_checkpoints
    need = plan.checkpoint_bytes(encoder_parameters) * (keep + 1)
    about = f"{counted(keep, 'checkpoint')} and one in the making take {sized(need)}"
    if not storage.is_local:
        return ok("disk space", f"{about}; object storage tells nothing of its room")
    folder = next(path for path in (Path(storage.uri), *Path(storage.uri).parents) if path.exists())
    free = shutil.disk_usage(folder).free
    found, cure = f"{about}; {sized(free)} are free at {folder}", "make room, name another --storage, or lower run.keep_checkpoints"
    if free < need:
        return failed("disk space", found, cure)
    return warning("disk space", found, cure) if free < 2 * need else ok("disk space", found)
