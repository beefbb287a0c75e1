"""`moco-ray doctor RECIPE`: what would go wrong, before it costs anything.

Responsible for the order of the checks, for what depends on what, and for the Ray in which machines are asked and two steps are taken. Not
responsible for the checks (checks/). A check that fails stops no other; what cannot be known without it is skipped, with the reason.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from moco_ray.checks import images, machines, node, step, storage
from moco_ray.checks import plan as plan_checks
from moco_ray.checks.finding import Finding, counted, failed, mistake, ok, skipped, warning
from moco_ray.cluster import ask_each_node, of_nodes
from moco_ray.data.shards import Manifest
from moco_ray.data.storage import Store
from moco_ray.data.stream import tasks_of_a_rank
from moco_ray.data.survey import build_manifest
from moco_ray.errors import UserError
from moco_ray.evaluate.features import labelled_sets
from moco_ray.launch_doctor import carry_trial
from moco_ray.method.encoder import Encoder
from moco_ray.plan import Plan, Workers
from moco_ray.recipe import Recipe
from moco_ray.session import Room, lazily_spread, ray_session
from moco_ray.words import note

ANSWER_SECONDS = 120.0  # for a node: a new process imports torch there
HERE = "this machine"


@dataclass
class _Case:
    """What is asked about, and what is known of it by now."""

    recipe: Recipe
    workers: Workers
    storage: Store
    debug: bool
    manifest: Manifest | None = None
    plan: Plan | None = None
    ahead: dict[str, float | None] = field(default_factory=dict)  # whose clock -> seconds ahead of this machine's
    found: list[Finding] = field(default_factory=list)

    def status(self, name: str) -> bool:
        """Whether the check of that name may be relied on."""
        return any(finding.name == name and finding.is_whole for finding in self.found)


def doctor(recipe: Recipe, storage_uri: str, workers: Workers, debug: bool = False) -> list[Finding]:
    """All findings, in the order of the table. Raises UserError only for what makes no sense to ask about (no data set, a malformed URI)."""
    recipe = recipe.at_absolute_paths()
    if not recipe.data.uri:
        raise UserError("no data set: give --data FOLDER, or data.uri in the recipe")
    case = _Case(recipe, workers, Store.at(storage_uri), debug)
    _look_at_data_and_storage(case, Store.at(recipe.data.uri))
    _look_at_machines(case)
    return case.found


def _look_at_data_and_storage(case: _Case, data: Store) -> None:
    recipe = case.recipe
    note("reading the data set ..")
    finding, refused = storage.credentials({"the data set": data, "the storage": case.storage})
    case.found.append(finding)
    case.found += _data(case, None if "the data set" not in refused else "the credentials are refused")
    case.found += plan_checks.about_plan(case.plan, case.workers) if case.plan else [skipped("recipe", "it depends on the rows of the data set")]
    if case.manifest is not None:
        case.found += images.about_images(case.manifest, recipe)
    else:
        case.found += [skipped(name, "the data set cannot be read") for name in ("images", "duplicates")]
    if recipe.evaluation.bank_uri:
        case.found.append(_labelled(case))
    if "the storage" in refused:
        case.found += [skipped(name, "the credentials are refused") for name in ("storage", "one driver at a time")]
    else:
        rows, case.ahead["the storage"] = storage.writable(case.storage)
        case.found += rows
    if case.plan:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in Encoder(recipe.encoder, recipe.batch.bn_group_size).parameters())
        case.found.append(storage.disk_space(case.storage, case.plan, parameters))


def _data(case: _Case, why_not: str | None) -> list[Finding]:
    if why_not:
        return [skipped("data", why_not)]
    recipe = case.recipe
    try:
        with lazily_spread(1, case.debug) as spread:
            case.manifest = build_manifest(recipe.data.uri, recipe.data.image_column, spread)
        case.plan = Plan(recipe, case.manifest.rows)
    except UserError as error:
        return [mistake("data", error)]
    manifest, plan = case.manifest, case.plan
    found = f"{manifest.rows:,} rows in {counted(len(manifest.names), 'file')} ({manifest.layout}); {plan.total_steps:,} steps, {plan.epochs:.4g} epochs"
    if manifest.warnings:
        more = f" (and {len(manifest.warnings) - 1} more)" if len(manifest.warnings) > 1 else ""
        return [warning("data", f"{found}; {manifest.warnings[0]}{more}", "`moco-ray pack` makes shuffled, checked shards of it")]
    return [ok("data", found)]


def _labelled(case: _Case) -> Finding:
    try:
        with lazily_spread(1, case.debug) as spread:
            bank, queries = labelled_sets(case.recipe, spread=spread)
    except UserError as error:
        return mistake("evaluation sets", error)
    return ok("evaluation sets", f"bank of {len(bank.rows):,} rows, {len(queries.rows):,} queries")


def _look_at_machines(case: _Case) -> None:
    note("starting Ray, or joining its cluster ..")
    with contextlib.ExitStack() as stack:
        room, finding = _room(case, stack)
        case.found.append(finding)
        nodes = _ask(case, room is not None)
        here = node.ask(None, "", None, "")("127.0.0.1")
        nodes = nodes or {HERE: here}
        world = case.workers.most
        case.found += [
            machines.versions(nodes),
            machines.gpus(nodes, int(sum(of_nodes("GPU").values())) if room else 0, case.workers),
            machines.precision(nodes, case.recipe, bool(room and room.on_gpus)),
            *_object_store(case, room, nodes, world),
            machines.open_files(nodes),
            machines.network(nodes),
            machines.ports(nodes, here),
            machines.reach(nodes),
            storage.clock(case.ahead),
        ]
        case.found += _step(case, room)


def _room(case: _Case, stack: contextlib.ExitStack) -> tuple[Room | None, Finding]:
    """A Ray, with room for the workers if there is; the step is taken only if this check does not fail."""
    too_many = case.plan is not None and not case.status("workers")
    try:
        room = stack.enter_context(ray_session(Workers(1) if too_many else case.workers, case.debug))
    except UserError as error:
        room = None
        with contextlib.suppress(UserError):  # one worker less, or no cluster at all
            room = stack.enter_context(ray_session(1, case.debug))
        return room, mistake("room", error)
    if too_many:
        return room, skipped("room", "there are too many workers")
    nodes, fit, least = of_nodes("CPU"), room.fits_now(), case.workers.least or case.workers.most
    found = f"{counted(len(nodes), 'node')}, room for {counted(fit, 'worker')} now, each with {room.each}"
    if fit < least:
        return room, warning("room", f"{found}; {least} are needed: the run would wait", "end what runs there, or use fewer --workers")
    return room, ok("room", found)


def _ask(case: _Case, has_ray: bool) -> machines.Nodes:
    """What each node tells; {} without a Ray. Adds the finding about those that tell nothing, and clocks."""
    if not has_ray:
        case.found.append(skipped("nodes", "there is no Ray to ask them through; what follows is of this machine"))
        return {}
    note("asking every node ..")
    with _object_for_all(case) as (place, name):
        data = case.manifest.store if case.manifest else None
        question = node.ask(data, case.manifest.name(0) if case.manifest else "", place, name)
        began = time.time()
        answers = ask_each_node(question, ANSWER_SECONDS)
        ended = time.time()
    case.found.append(machines.answered(answers))
    nodes = {who: answer for who, answer in answers.items() if isinstance(answer, node.Node)}
    if len(nodes) > 1:
        case.ahead |= {who: storage.outside(told.time, began, ended) for who, told in nodes.items()}
    return nodes


@contextlib.contextmanager
def _object_for_all(case: _Case) -> Iterator[tuple[Store | None, str]]:
    if not case.status("storage"):
        yield None, ""
        return
    with storage.placed(case.storage) as place:
        yield place


def _object_store(case: _Case, room: Room | None, nodes: machines.Nodes, world: int) -> list[Finding]:
    why = "there is no Ray" if room is None else "" if case.plan else "it depends on the data set" if case.manifest is None else "there is no plan"
    why = why or ("" if case.status("workers") else "there are too many workers")
    if why:
        return [skipped(name, why) for name in ("object store", "shared memory")]
    try:
        tasks, _ = tasks_of_a_rank(room.data_place(world).cpus, world, case.manifest.store.is_local)
    except RuntimeError as error:
        return [failed("object store", str(error).rpartition("; ")[0], "fewer --workers, or a cluster with more CPUs"), skipped("shared memory", "no data task has room")]
    return machines.object_store(nodes, of_nodes("object_store_memory"), world * case.plan.object_store_bytes(world, tasks), world)


def _step(case: _Case, room: Room | None) -> list[Finding]:
    """Two steps on all workers, if all that they need is there."""
    needs = ("data", "images", "workers", "room", "nodes", "precision", "network", "ports", "reach")
    lacking = [name for name in needs if not case.status(name)]
    world = min(case.workers.most, room.fits_now()) if room else 0
    if lacking or case.plan is None:
        return step.not_taken(f"it needs {', '.join(lacking)}, see above")
    if world < (case.workers.least or case.workers.most):
        return step.not_taken(f"there is room for {world} workers now, and the step would wait for more")
    note(f"two steps on {counted(world, 'worker')} ..")
    try:
        return step.about_step(carry_trial(case.manifest, case.plan, world, room, case.debug), case.plan)
    except UserError as error:
        finding = mistake("", error)
        return step.broken(finding.found, finding.cure)
