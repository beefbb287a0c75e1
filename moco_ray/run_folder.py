"""The run folder: what lies where under `storage/name`, how it is made, and when it is refused.

Responsible for names and for the facts written once (recipe, plan, manifest, code version). Not responsible for
checkpoints' content (checkpoint.py), for metrics (monitor.py), nor for who carries the run (lease.py).
"""

import json
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from moco_ray import attempts
from moco_ray.data.shards import Manifest
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.plan import Plan, Workers
from moco_ray.recipe import Recipe
from moco_ray.source import git_state, versions

RECIPE, PLAN, MANIFEST, FACTS, REQUEST = "recipe.toml", "plan.json", "manifest.parquet", "run.json", "ray-request"
UNBEGUN = (RECIPE, PLAN, MANIFEST, "warm-start.safetensors", "lease.json", "lock")  # what may lie in a folder whose run was cut off before it began


@dataclass(frozen=True)
class RunFolder:
    """One run in any storage. `store` must be reachable under the same URI from every node of the cluster."""

    store: Store

    @classmethod
    def at(cls, storage: str, name: str) -> "RunFolder":
        """The folder of a run that may not exist yet. Raises UserError for a storage or a name that cannot be one."""
        if not name or "/" in name or name.startswith("."):
            raise UserError(f"--name {name!r} must be a folder name without '/' that does not begin with '.'")
        return cls(Store.at(storage).below(name))

    @classmethod
    def existing(cls, run: str) -> "RunFolder":
        """The folder of a run that was started. Raises UserError if there is none."""
        folder = cls(Store.at(run))
        if folder.store.size(FACTS) is None:
            raise UserError(
                f"{run} is no run folder (it has no run.json); give the path that `moco-ray pretrain` printed"
            )
        return folder

    @property
    def place(self) -> str:
        """Its path or URI, as the commands take it."""
        return self.store.uri

    def recipe(self, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
        text = self.store.read(RECIPE).decode("utf-8")
        return Recipe.of_text(text, self.store.place(RECIPE), overrides)

    def manifest(self) -> Manifest:
        return Manifest.load(pa.BufferReader(self.store.read(MANIFEST)), self.store.place(MANIFEST))

    def holds(self, recipe: Recipe, manifest: Manifest) -> bool:
        """Whether this very run lies here already. Raises UserError if another run or something else does."""
        if self.store.size(FACTS) is None:
            self.refuse_strange()
            return False
        held = self.recipe()
        if held.fingerprint() != recipe.fingerprint():
            raise UserError(
                f"{self.place} already holds a run of another recipe ({'; '.join(held.differences(recipe)[:4])}); "
                "choose another --name"
            )
        self.refuse_other_data(manifest, recipe.data.uri)
        return True

    def refuse_strange(self) -> None:
        """Raise UserError if something else than a run lies here."""
        strange = [entry.name for entry in self.store.list() if not entry.name.startswith(UNBEGUN)]
        if strange and self.store.size(FACTS) is None:
            raise UserError(
                f"{self.place} is not empty and no run folder (it holds {strange[0]}); choose another --storage or --name"
            )

    def refuse_other_data(self, manifest: Manifest, uri: str) -> None:
        """Raise UserError if the data is not what the run began with."""
        held = self.manifest()
        if held.fingerprint != manifest.fingerprint:
            raise UserError(
                f"the data at {uri} is not what the run {self.place} began with ({manifest.rows} rows, {held.rows} then; "
                f"fingerprint {manifest.fingerprint}, {held.fingerprint} then); bring it back, or start a new run under another --name"
            )

    def create(self, recipe: Recipe, plan: Plan, manifest: Manifest) -> None:
        """Write the facts of a new run; run.json last, for it makes the folder a run."""
        self._write(RECIPE, recipe.toml())
        self._write(PLAN, json.dumps(plan.facts(), indent=1))
        self._write_manifest(manifest)
        self._write(FACTS, json.dumps({**code_version(), "data_fingerprint": manifest.fingerprint}, indent=1))

    def update(self, recipe: Recipe, manifest: Manifest) -> None:
        """Write what a resumed run may change: intervals, and the data's address."""
        if self.store.read(RECIPE).decode("utf-8") != recipe.toml():
            self._write(RECIPE, recipe.toml())
        if self.manifest().root != manifest.root:
            self._write_manifest(manifest)

    def last_workers(self) -> Workers:
        """How many workers were asked for last; one if none were yet."""
        return next((Workers.of(attempt.asked) for attempt in reversed(attempts.all_of(self.store))), Workers(1))

    def remember_request(self, request: str) -> None:
        """Ray Train's name for what the run asks of the cluster, for the next driver if this one dies."""
        self._write(REQUEST, request)

    def last_request(self) -> str:
        """The one that was remembered last; "" for none."""
        return self.store.read(REQUEST).decode() if self.store.size(REQUEST) is not None else ""

    def _write(self, name: str, text: str) -> None:
        self.store.write(name, text.encode("utf-8"))

    def _write_manifest(self, manifest: Manifest) -> None:
        sink = pa.BufferOutputStream()
        manifest.save(sink)
        self.store.write(MANIFEST, sink.getvalue().to_pybytes())


def code_version() -> dict[str, Any]:
    """Date, release, git commit and dirty flag ("" outside a checkout), and the versions that compute."""
    commit, dirty = git_state()
    packages = ("moco_ray", "torch", "torchvision", "torchcodec", "ray", "pyarrow", "numpy")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": commit,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "versions": versions(packages),
    }
