"""Checkpoint files: written whole or not at all, verified, pruned, and refused when they do not fit.

One `step-N.pt` with tensors and plain values, and beside it `step-N.json`, written last: only with it does
the checkpoint exist. Not here: what a state holds (learner.py) and other people's formats.
"""

import contextlib
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import torch

from moco_ray.data import order
from moco_ray.errors import UserError

VERSION = 1


def save(folder: Path, step: int, state: dict[str, Any], about: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` and prune all but the newest `keep`. Returns the tensor file's path.

    `about` is small and JSON: the recipe's and the data's fingerprints. Raises UserError when the file cannot
    be written (a full disk); the checkpoints before it stay as they were.
    """
    path = folder / f"step-{step:09d}.pt"
    part, marker_part = path.with_suffix(".pt.part"), path.with_suffix(".json.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size, digest = _write(part, {"version": VERSION, "about": about, "state": state})
        marker = {"version": VERSION, "step": step, "bytes": size, "sha256": digest, "about": about}
        marker_part.write_text(json.dumps(marker, indent=1))
        os.replace(part, path)
        os.replace(marker_part, path.with_suffix(".json"))  # from here on the checkpoint exists
    except (OSError, RuntimeError) as error:  # torch wraps a failed write in a RuntimeError
        for leftover in (part, marker_part):
            with contextlib.suppress(OSError):
                leftover.unlink()
        last = newest(folder)
        safe = f"the checkpoint of step {step_of(last)} is whole" if last else "there is no earlier checkpoint"
        raise UserError(
            f"could not save the checkpoint of step {step} in {folder}: {_reason(error)}; {safe}. Make room (or mend the "
            "storage) and go on with `moco-ray resume`"
        ) from error
    for old in whole(folder)[keep:]:
        with contextlib.suppress(OSError):  # what cannot be deleted now is tried again at the next save
            old.with_suffix(".json").unlink()  # first the marker: a half-deleted checkpoint is no checkpoint
            old.unlink()
    return path


def whole(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, newest first: marked complete, and of the size that was written."""
    found = []
    for marker in sorted(folder.glob("step-*.json"), reverse=True):
        path = marker.with_suffix(".pt")
        try:
            expected = json.loads(marker.read_text())["bytes"]
        except (ValueError, KeyError, OSError):
            continue
        if path.is_file() and path.stat().st_size == expected:
            found.append(path)
    return found


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder, if there is one."""
    return next(iter(whole(folder)), None)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def about_of(path: Path) -> dict[str, Any]:
    """What a complete checkpoint says about itself, from its marker alone."""
    return json.loads(path.with_suffix(".json").read_text())["about"]


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read (state, about) to the CPU. Raises UserError if the file is missing, damaged or of another version.

    The bytes are compared with the marker's checksum, and are read with `weights_only`: a checkpoint is
    never code.
    """
    marker = path.with_suffix(".json")
    if not path.is_file() or not marker.is_file():
        raise UserError(f"no checkpoint at {path} (a whole one has a .pt and a .json file)")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != json.loads(marker.read_text())["sha256"]:
        raise UserError(
            f"the checkpoint {path} is damaged: its bytes are not those that were written; remove its .json file so that "
            "the one before it is used"
        )
    held = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if held.get("version") != VERSION:
        raise UserError(
            f"{path} has version {held.get('version')!r} and this release reads {VERSION}; use the release that wrote it"
        )
    return held["state"], held["about"]


def refuse_other(path: Path, about: dict[str, Any], recipe_fingerprint: str, data_fingerprint: str) -> None:
    """Raise UserError if a checkpoint belongs to another recipe or another data set."""
    if about["recipe_fingerprint"] != recipe_fingerprint:
        raise UserError(
            f"{path} was made with recipe {about['recipe_fingerprint']} and this run's recipe is {recipe_fingerprint}; "
            "resume with the recipe in its run folder, or start a new run under another --name"
        )
    if about.get("order_version", 1) != order.VERSION:
        raise UserError(
            f"{path} was made by another release of moco_ray, which goes through the data in another order: an epoch would repeat "
            "some images and miss others. Resume with the release that wrote it (code in its run.json), or start a new run"
        )
    if about["data_fingerprint"] != data_fingerprint:
        raise UserError(
            f"{path} was made with data set {about['data_fingerprint']} and this run reads {data_fingerprint}: images were "
            "added, removed or changed; bring the data back to what it was, or start a new run under another --name"
        )


def _write(path: Path, content: dict[str, Any]) -> tuple[int, str]:
    """Write, force to disk, and return the size in bytes and the SHA-256 of what was read back."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        last, error = error, error.__cause__ or error.__context__
    return str(last).splitlines()[0]
