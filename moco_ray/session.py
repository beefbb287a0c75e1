"""The Ray that a command works on: the cluster where there is one, otherwise a local one of its own.

Responsible for starting and stopping it, for room for workers and data tasks, and for starting it only when a data set
is large enough to need it. Not responsible for what runs there.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import ray

from moco_ray.data.on_ray import spread
from moco_ray.data.survey import Spread
from moco_ray.errors import UserError

SPARE_CPUS = 2  # for the data tasks of a local Ray; they share the cores with the workers


class Room(NamedTuple):
    """What a Ray has for a run."""

    worker_cpus: int  # of each worker
    gpus: int  # in all
    data_cpus: int  # in all


@contextlib.contextmanager
def lazily_spread(workers: int, debug: bool = False) -> Iterator[Spread]:
    """A map over tasks of a Ray that is started when it is first used, and stays until this ends."""
    with contextlib.ExitStack() as stack:

        def on_session(work: Callable, items: Sequence) -> Iterator:
            stack.enter_context(ray_session(workers, debug))
            yield from spread(work, items)

        yield on_session


@contextlib.contextmanager
def ray_session(workers: int, debug: bool = False) -> Iterator[Room]:
    """A Ray with room for the workers and their data tasks.

    The cluster where there is one (RAY_ADDRESS, or inside `ray job submit`); otherwise a local Ray, which is
    stopped again. Its logical CPUs are more than the cores: the data tasks share them with the workers.
    """
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
        each = max(1, len(os.sched_getaffinity(0)) // workers)
        ray.init("local", num_cpus=workers * each + max(SPARE_CPUS, workers), include_dashboard=False, **common)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus, cpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("GPU", "CPU"))
        # On a cluster a quarter of the CPUs is left for reading data; the local Ray was made with its spare ones.
        spare = max(SPARE_CPUS, workers, cpus // 4 if os.environ.get("RAY_ADDRESS") else 0)
        each = max(1, (cpus - spare) // workers) if not gpus else 1
        while each > 1 and sum(int(node.get("CPU", 0)) // each for node in nodes) < workers:
            each -= 1  # a worker's CPUs must lie on one node
        if cpus < workers * each + 1:
            raise UserError(
                f"the Ray cluster has {cpus} CPUs: {workers} workers of {each} leave none for reading data, and the run would wait "
                "for ever; use fewer --workers, or a cluster with more CPUs"
            )
        if 0 < gpus < workers:
            raise UserError(f"the Ray cluster has {gpus} GPUs for {workers} workers; use at most {gpus} --workers")
        yield Room(each, gpus, cpus - workers * each)
    finally:
        if ours:
            ray.shutdown()
