"""Checkpoints of a run in any storage: written whole or not at all, read back, pruned, and refused when they do not fit.

One object `checkpoints/step-N.aM.pt` with tensors and plain values (step N, written by attempt M), and beside it the
marker `step-N.aM.json`, written last: only with it does the checkpoint exist. A worker that the network cut off goes on
writing under its old attempt; what it writes past the step where a later attempt began is never believed.
Not here: what a state holds (learner.py), who may start an attempt (attempts.py, lease.py), other people's formats.
"""

import contextlib
import hashlib
import io
import json
import pickle
import re
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moco_ray import attempts as registry
from moco_ray.data import order
from moco_ray.data.storage import PIECE_BYTES, Store, one_line
from moco_ray.errors import StorageFailing, UserError
from moco_ray.standing import Standing

VERSION = 1
FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{9,})(?:\.a(\d{6,}))?\.(pt|json)")  # without .aM as earlier releases wrote it: attempt 0


class Damaged(UserError):
    """The storage works, and what it holds is no checkpoint of this release: another one may do."""

    cause = ""

    @classmethod
    def of(cls, place: str, cause: str, cure: str) -> "Damaged":
        error = cls(f"the checkpoint {place} is damaged: {cause}; {cure}")
        error.cause = cause
        return error


class Saved(NamedTuple):
    """A checkpoint as its marker tells it."""

    step: int
    attempt: int  # 0: an earlier release
    bytes: int  # of the object with the tensors
    sha256: str
    about: dict[str, Any]  # small: the recipe's and the data's fingerprints

    @property
    def name(self) -> str:
        return name_of(self.step, self.attempt)


class Found(NamedTuple):
    """What a listing shows of a checkpoint."""

    step: int
    attempt: int
    parts: dict[str, int]  # bytes of "pt" and of "json", where they are there
    believed: bool
    saved: Saved | None  # None: the marker or the object with the tensors is not as it must be
    flaw: str

    @property
    def name(self) -> str:
        return name_of(self.step, self.attempt)


def pack(state: dict[str, Any], about: dict[str, Any]) -> bytes:
    """The content of a checkpoint. `about` is small and JSON: the recipe's and the data's fingerprints."""
    buffer = io.BytesIO()
    torch.save({"version": VERSION, "about": about, "state": state}, buffer)
    return buffer.getvalue()


def save(run: Store, step: int, attempt: int, content: bytes, about: dict[str, Any], keep: int) -> Saved:
    """Store a checkpoint, read it back, mark it, and prune all but the newest `keep` believed ones and those of standing.py.

    `content` is from `pack`. Raises UserError when it cannot be stored or came back otherwise, and when a later attempt
    carries the run; then there is no marker, and the checkpoints before it stay as they were.
    """
    saved = Saved(step, attempt, len(content), hashlib.sha256(content).hexdigest(), about)
    try:
        _refuse_if_replaced(run, attempt)
        if run.size(f"{saved.name}.json") is not None:  # from here on it would belong to other bytes
            run.delete(f"{saved.name}.json")
        run.write(f"{saved.name}.pt", content)
        _verify(run, saved)
        _refuse_if_replaced(run, attempt)  # the upload may have taken minutes
        run.write(f"{saved.name}.json", json.dumps({"version": VERSION, **saved._asdict()}, indent=1).encode())
    except UserError as error:
        last, safe = _last_whole(run)
        if last is None or last[:4] != saved[:4]:  # else only the reply to the last write was lost
            raise (StorageFailing if isinstance(error, StorageFailing) else UserError)(
                f"could not save the checkpoint of step {step} in {run.place(FOLDER)}: {error}; {safe}, and "
                "`moco-ray resume` goes on from there"
            ) from error
    with contextlib.suppress(UserError):  # what cannot be deleted now is tried again at the next save
        prune(run, saved, keep)
    return saved


def whole(run: Store) -> list[Saved]:
    """The checkpoints that are complete and believed, newest first. Raises UserError if the storage cannot be read.

    Complete: with a marker, and of the size that it tells. Believed: no later attempt began before that step.
    """
    return [found.saved for found in survey(run) if found.believed and found.saved]


def newest(run: Store) -> Saved | None:
    """The newest checkpoint that is complete and believed, if there is one."""
    return next(iter(whole(run)), None)


def load(run: Store, saved: Saved) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read (state, about) to the CPU. Raises Damaged if it is missing, not as it was written, or of another version.

    The bytes are compared with the marker's checksum, and are read with `weights_only`: a checkpoint is
    never code. A storage that cannot be read is a UserError, not Damaged.
    """
    buffer = io.BytesIO()
    for piece in _pieces(run, saved):
        buffer.write(piece)
    buffer.seek(0)
    place = run.place(f"{saved.name}.pt")
    try:
        held = torch.load(buffer, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        cause = "it holds code or objects that are no tensors, which were not executed"
        raise Damaged.of(place, cause, "find out who wrote it, and remove it with its .json") from error
    except (RuntimeError, ValueError, LookupError, EOFError, AttributeError, TypeError, OSError) as error:
        raise Damaged.of(place, f"it cannot be read ({one_line(error)})", _remove(saved)) from error
    version = held.get("version") if isinstance(held, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise UserError(  # not damaged: an earlier one in its place would make this one a thing of the past, to be pruned
            f"the checkpoint {place} has version {version} and this release reads {VERSION}; use the release that wrote it"
        )
    if version != VERSION or not {"state", "about"} <= held.keys():
        cause = f"it has version {version!r} and this release reads {VERSION}"
        raise Damaged.of(place, cause, "use the release that wrote it")
    return held["state"], held["about"]


def load_newest(
    run: Store, told: Callable[[str], None], accept: Callable[[Saved], None]
) -> tuple[Saved, dict[str, Any]] | None:
    """The newest checkpoint that can be loaded, and its state; None if there is none at all.

    A damaged one is named through `told` and the one before it is taken. What `accept` raises ends the search: another
    recipe or data set is that of all of a run's checkpoints. Raises UserError if every one is damaged.
    """
    believed = [found for found in survey(run) if found.believed and "json" in found.parts]
    damage = []
    for found, before in zip_longest(believed, believed[1:]):
        place = run.place(f"{found.name}.pt")
        try:
            if found.saved is None:
                raise Damaged.of(place, found.flaw, "")
            accept(found.saved)
            return found.saved, load(run, found.saved)[0]
        except Damaged as error:
            damage.append(f"{place} is damaged: {error.cause}")
            if before:
                told(f"the checkpoint {damage[-1]}; using the one of step {before.step} before it")
    if damage:
        raise UserError(
            f"no checkpoint of {run.place('')} can be loaded: the newest, {damage[0]}; put it back as it was, start a new run "
            f"under another --name, or remove {run.place(FOLDER)} to start this one from step 0"
        )
    return None


def refuse_other(place: str, about: dict[str, Any], recipe_fingerprint: str, data_fingerprint: str) -> None:
    """Raise UserError if a checkpoint belongs to another recipe or another data set."""
    if about["recipe_fingerprint"] != recipe_fingerprint:
        raise UserError(
            f"{place} was made with recipe {about['recipe_fingerprint']} and this run's recipe is {recipe_fingerprint}; "
            "resume with the recipe in its run folder, or start a new run under another --name"
        )
    if about.get("order_version", 1) != order.VERSION:
        raise UserError(
            f"{place} was made by another release of moco_ray, which goes through the data in another order: an epoch would repeat "
            "some images and miss others. Resume with the release that wrote it (code in its run.json), or start a new run"
        )
    if about["data_fingerprint"] != data_fingerprint:
        raise UserError(
            f"{place} was made with data set {about['data_fingerprint']} and this run reads {data_fingerprint}: images were "
            "added, removed or changed; bring the data back to what it was, or start a new run under another --name"
        )


def name_of(step: int, attempt: int) -> str:
    """As it is called in the run folder, without its ending."""
    return f"{FOLDER}/step-{step:09d}" + (f".a{attempt:06d}" if attempt else "")


def _remove(saved: Saved) -> str:
    return f"remove {saved.name}.json so that the one before it is used, or put the file back as it was"


def survey(run: Store) -> list[Found]:
    """Everything in the folder of checkpoints, newest first. A marker of what is not believed is not read."""
    parts: dict[tuple[int, int], dict[str, int]] = {}
    for entry in run.below(FOLDER).list():
        if match := NAME.fullmatch(entry.name):
            parts.setdefault((int(match[1]), int(match[2] or 0)), {})[match[3]] = entry.bytes
    attempts = registry.all_of(run)  # later than the listing: it cannot miss one
    found = []
    for (step, attempt), sizes in sorted(parts.items(), reverse=True):
        believed = all(step <= later.from_step for later in attempts if later.number > attempt)
        saved, flaw = _marked(run, step, attempt, sizes) if believed and "json" in sizes else (None, "")
        if believed and not saved and not flaw:
            sizes.pop("json", None)
        found.append(Found(step, attempt, sizes, believed, saved, flaw))
    return found


def _marked(run: Store, step: int, attempt: int, sizes: dict[str, int]) -> tuple[Saved | None, str]:
    """A checkpoint by its marker; or None, and what is wrong with it ("": the marker is gone)."""
    marker = f"{name_of(step, attempt)}.json"
    try:
        text = run.read(marker)
    except UserError:
        if run.size(marker) is None:  # pruned since it was listed; then the tensors go too
            return None, ""
        raise
    try:
        held = json.loads(text)
        saved = Saved(held["step"], held.get("attempt", 0), held["bytes"], held["sha256"], dict(held["about"]))
    except (ValueError, LookupError, TypeError, AttributeError):
        saved = None
    if saved and not {"recipe_fingerprint", "data_fingerprint"} <= saved.about.keys():
        saved = None
    if saved is None or saved[:2] != (step, attempt) or [type(value) for value in saved[:4]] != [int, int, int, str]:
        return None, f"its marker {marker} cannot be read"
    return (None, flaw) if (flaw := _size_flaw(sizes.get("pt"), saved)) else (saved, "")


def _size_flaw(stored: int | None, saved: Saved) -> str:
    if stored is None:
        return "it is missing, and its marker is there"
    return "" if stored == saved.bytes else f"{stored} bytes are stored of the {saved.bytes} that were written"


def _pieces(run: Store, saved: Saved) -> Iterator[bytes]:
    """The stored bytes in pieces. Raises Damaged at once if they are too many or too few, at the end if others."""
    name = f"{saved.name}.pt"
    if flaw := _size_flaw(run.size(name), saved):
        raise Damaged.of(run.place(name), flaw, _remove(saved))
    digest = hashlib.sha256()
    for start in range(0, saved.bytes, PIECE_BYTES):
        piece = run.read(name, start, min(start + PIECE_BYTES, saved.bytes))
        digest.update(piece)
        yield piece
    if digest.hexdigest() != saved.sha256:
        raise Damaged.of(run.place(name), "its bytes are not those that were written", _remove(saved))


def _verify(run: Store, saved: Saved) -> None:
    """Read back what was written just now. Raises UserError, and takes it away, if it is something else."""
    try:
        for _ in _pieces(run, saved):
            pass
    except Damaged as error:
        with contextlib.suppress(UserError):
            run.delete(f"{saved.name}.pt")
        raise UserError(
            f"{run.place(saved.name)}.pt did not come back as it was sent: {error.cause}; mend the storage"
        ) from error


def _refuse_if_replaced(run: Store, attempt: int) -> None:
    last = max(registry.numbers(run), default=0)
    if last > attempt:
        raise UserError(f"attempt {last} carries the run now, and this process is of attempt {attempt}; end it")


def _last_whole(run: Store) -> tuple[Saved | None, str]:
    """The newest checkpoint and words for it, also when the storage does not answer."""
    try:
        last = newest(run)
    except UserError:
        return None, "the checkpoints before it are as they were"
    return last, f"the checkpoint of step {last.step} is whole" if last else "there is no earlier checkpoint"


def prune(run: Store, saved: Saved, keep: int) -> None:
    """Delete what `saved`, which was read back, makes superfluous; nothing that another process may be writing.

    The marker goes first: a half-deleted checkpoint is no checkpoint. Raises UserError at the first that stays.
    """
    found = survey(run)
    good = [one.name for one in found if one.believed and one.saved]
    if saved.name not in good:  # a later attempt began meanwhile: what is superfluous is its to say
        return
    kept = {*good[:keep], saved.name, *Standing.read(run).names}
    for one in found:
        ours_or_before = one.attempt < saved.attempt or (one.attempt == saved.attempt and one.step < saved.step)
        if one.name not in kept and ours_or_before:
            for part in sorted(one.parts):  # "json" before "pt"
                run.delete(f"{one.name}.{part}")
    if run.is_local:  # what a killed process was writing has a hidden name
        for path in Path(run.place(FOLDER)).glob(".step-*.part"):
            match = NAME.match(path.name[1:])
            if match and (int(match[2] or 0), int(match[1])) < (saved.attempt, saved.step):
                run.delete(f"{FOLDER}/{path.name}")
