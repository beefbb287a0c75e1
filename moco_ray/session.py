"""The Ray that a command works on: the cluster where there is one, otherwise a local one of its own.

Responsible for starting and stopping it, for room for workers and data tasks, and for starting it only when a data set
is large enough to need it. Not responsible for what runs there.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import ray

from moco_ray.data.on_ray import spread
from moco_ray.data.survey import Spread
from moco_ray.errors import UserError
from moco_ray.placement import DATA, GROUP, DataPlace, Machine, in_cpus, place_data, worker_homes
from moco_ray.plan import Workers
from moco_ray.ranks import Ranks

SPARE_CPUS = 2  # for the data tasks of a local Ray; they share the cores with the workers
# Of a CPU, that each worker of an elastic run claims and leaves to data tasks: Ray takes as many workers as fit, and they must
# not fill a machine. Exact in binary, as Ray's own division by the claim must be. The first that fills no node is taken.
LEFT_FOR_DATA = (0.25, 0.375, 0.5, 0.125)
CLAIM_BESIDE_GPU = 0.75  # of a CPU


class Helpers(NamedTuple):
    """The processes that run a backbone in an evaluation beside the training."""

    count: int
    on_gpus: bool  # one each
    options: dict[str, Any] = {}  # of Ray, for what needs no GPU


class Room(NamedTuple):
    """What a Ray has for a run, and what each worker of it takes."""

    worker_cpus: int  # threads of each worker
    claim: dict[str, float]  # Ray's resources for one worker
    spare_gpus: int = 0  # that no worker takes
    selector: dict[str, str] | None = None  # of labels, that a worker's node must have

    @property
    def on_gpus(self) -> bool:
        return self.claim.get("GPU", 0) > 0

    def data_place(self, workers: int, seats: Sequence[str] = (), own: str = "") -> DataPlace:
        """Where data tasks run beside so many workers, in the cluster as it is now. Raises RuntimeError if no CPU is left for them.

        `seats`: the node id of each worker, and `own`, of the one that asks; where they are known.
        """
        place = place_data(_living(), self.claim["CPU"], workers, seats, own)
        if place.cpus <= 0:
            raise RuntimeError(  # no mistake: a cluster that grows or shrinks may leave none for a moment
                f"{workers} workers take all CPUs of the Ray cluster, and none is left for reading data; use fewer --workers, or "
                "a cluster with more CPUs"
            )
        return place

    def data_place_beside(self, ranks: Ranks) -> Callable[[], DataPlace]:
        """The same for this rank, to be asked when it is wanted. Collective."""
        own = ray.get_runtime_context().get_node_id()
        return partial(self.data_place, ranks.world, ranks.gather_objects(own), own)

    def helpers(self) -> Helpers | None:
        """What runs a backbone in evaluations beside the training: the GPUs that are left over; without GPUs a process for each four
        CPUs, which lets the workers go first. None where the workers take all GPUs.
        """
        machines = _living()
        options = place_data(machines, self.claim["CPU"], 0).options
        if self.on_gpus:
            return Helpers(self.spare_gpus, True, options) if self.spare_gpus else None
        return Helpers(max(1, int(sum(machine.cpus for machine in machines)) // 4), False, options)

    def fits(self) -> int:
        """How many workers the living machines hold, if nothing else ran there."""
        homes = [node for node in _living() if self.selector is None or node.group == self.selector[GROUP]]
        nodes = [{"CPU": home.cpus, "GPU": home.gpus} for home in homes]
        return sum(int(min(node.get(kind, 0) / amount for kind, amount in self.claim.items())) for node in nodes)

    def fits_now(self) -> int:
        """How many find room beside all that runs now."""
        free = ray.available_resources()
        return min(self.fits(), *(int(free.get(kind, 0) / amount) for kind, amount in self.claim.items()))

    @property
    def each(self) -> str:
        """What a worker claims, for people."""
        return " and ".join(f"{amount:g} {kind}" for kind, amount in self.claim.items())

    def words(self, workers: Workers) -> str:
        """Whether so many workers would find room now, for people."""
        fit, each = self.fits(), self.each
        least = workers.least or workers.most
        if fit >= least:
            return f"they are being started; the cluster has room for {fit}, each with {each}"
        return f"the cluster has room for {fit} of at least {least}, each with {each}; waiting for machines to come"


class Outlook(NamedTuple):
    """What there is to say of the cluster under a run, for people."""

    room: Room
    workers: Workers  # that the user asked for

    def waiting(self) -> str:
        """Whether they would find room now."""
        return self.room.words(self.workers)

    def readers_gone(self, seats: Sequence[str]) -> str:
        """What becomes of the data tasks beside workers on these nodes (ids), if nodes have labels and no data node is left; "" otherwise."""
        place = place_data(_living(), self.room.claim["CPU"], len(seats), seats)
        if not place.selectors or place.on_group:
            return ""
        if place.cpus > 0:
            return f"no data node is left: data tasks move to the other nodes ({in_cpus(place.cpus)})"
        return (
            "no data node is left, and the workers leave no CPU to data tasks: the run waits for one; start a node of the data group, or stop "
            "the run and resume it with fewer --workers"
        )


@contextlib.contextmanager
def lazily_spread(workers: int, debug: bool = False) -> Iterator[Spread]:
    """A map over tasks of a Ray that is started when it is first used, and stays until this ends."""
    with contextlib.ExitStack() as stack:

        def on_session(work: Callable, items: Sequence) -> Iterator:
            stack.enter_context(ray_session(workers, debug))
            yield from spread(work, items)

        yield on_session


@contextlib.contextmanager
def ray_session(workers: int | Workers, debug: bool = False) -> Iterator[Room]:
    """A Ray with room for the workers and their data tasks.

    The cluster where there is one (RAY_ADDRESS, or inside `ray job submit`); otherwise a local Ray, which is
    stopped again. Its logical CPUs are more than the cores: the data tasks share them with the workers. A cluster
    without room is refused, but for an elastic run, which waits for machines to come.
    """
    workers = Workers(workers) if isinstance(workers, int) else workers
    logging.getLogger("ray").setLevel(logging.INFO if debug else logging.ERROR)
    common = {"log_to_driver": debug, "logging_level": "INFO" if debug else "ERROR", "ignore_reinit_error": True}
    ours = not ray.is_initialized()
    if ours and os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(**common)
        except ConnectionError as error:
            address = os.environ["RAY_ADDRESS"]
            raise UserError(
                f"no Ray cluster answers at RAY_ADDRESS {address}; start it, or unset the variable"
            ) from error
    elif ours:
        each = max(1, len(os.sched_getaffinity(0)) // workers.most)
        ray.init("local", num_cpus=workers.most * each + max(SPARE_CPUS, workers.most), include_dashboard=False, **common)
    try:
        yield _room(_living(), workers)
    finally:
        if ours:
            ray.shutdown()


def _living() -> list[Machine]:
    return [Machine.of(node) for node in ray.nodes() if node["Alive"]]


def _room(machines: list[Machine], workers: Workers) -> Room:
    """What each worker gets on these nodes. Raises UserError if a run that cannot wait has no room."""
    nodes, selector = worker_homes(machines, workers.elastic)
    gpus, cpus = int(sum(node.gpus for node in nodes)), int(sum(node.cpus for node in nodes))
    on_cluster, most = bool(os.environ.get("RAY_ADDRESS")), workers.most
    apart = selector is not None and any(machine.group == DATA and machine.cpus > 0 for machine in machines)
    # On a cluster a quarter of the CPUs is left for reading data; the local Ray was made with its spare ones.
    spare = 0 if apart else max(SPARE_CPUS, most, cpus // 4 if on_cluster else 0)
    each = max(1, (cpus - spare) // most) if not gpus else 1
    while each > 1 and sum(int(node.cpus) // each for node in nodes) < most:
        each -= 1  # a worker's CPUs must lie on one node
    claim: dict[str, float] = {"CPU": each, **({"GPU": 1} if gpus else {})}
    if workers.elastic and on_cluster:
        if gpus:
            return Room(each, claim | {"CPU": CLAIM_BESIDE_GPU}, max(0, gpus - most))
        sizes = {node.cpus for node in nodes if node.cpus > 0}
        left = next((part for part in LEFT_FOR_DATA if all(size % (each + part) for size in sizes)), LEFT_FOR_DATA[0])
        return Room(each, claim | {"CPU": each + left})
    if cpus < most * each + (0 if apart else 1):
        where = "the train group of the Ray cluster" if selector else "the Ray cluster"
        raise UserError(
            f"{where} has {cpus} CPUs: {most} workers of {each} leave none for reading data, and the run would wait "
            "for ever; use fewer --workers, a cluster with more CPUs, or --workers FEWEST:MOST to wait for machines to come"
        )
    if 0 < gpus < most:
        raise UserError(
            f"the Ray cluster has {gpus} GPUs for {most} workers; use at most {gpus} --workers, or --workers FEWEST:MOST to wait "
            "for machines to come"
        )
    return Room(each, claim, max(0, gpus - most), selector)
