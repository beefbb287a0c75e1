"""Where the parts of a run sit on a cluster, by the labels of its nodes.

Responsible for which nodes the workers keep to, where data tasks run and how many CPUs they have there, and for telling it in words.
Pure: session.py asks Ray what there is, launch.py and data/stream.py tell it what is wanted. What needs no rule: Ray Train packs workers
on as few nodes as hold them, and has its controller where the driver is, as board.py has the mailbox.

How Ray 2.60 reads a task's `label_selector` with a `fallback_strategy` (tried on nodes that came and went): it takes the first selector that a
living node satisfies, and waits there while that node is busy. So a task stays off the nodes of the others, and is never lost for want of a label:
when the last node of the first kind goes, also waiting tasks move on, and when one comes back the next tasks go there.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

GROUP, TRAIN, DATA = "moco-ray/group", "train", "data"  # a label of nodes, as infra/ sets it: head, train or data
NODE_ID = "ray.io/node-id"  # a label that Ray itself sets
ANYWHERE: dict[str, str] = {}
NAMES_SHOWN = 4


class Machine(NamedTuple):
    """A living node of the cluster."""

    id: str
    name: str
    cpus: float
    gpus: float = 0.0
    group: str = ""  # of its label; "" without

    @classmethod
    def of(cls, node: dict[str, Any]) -> "Machine":
        """From an entry of ray.nodes()."""
        resources, labels = node["Resources"], node.get("Labels") or {}
        name = node["NodeName"] or node["NodeManagerAddress"]
        return cls(node["NodeID"], name, resources.get("CPU", 0.0), resources.get("GPU", 0.0), labels.get(GROUP, ""))


class DataPlace(NamedTuple):
    """Where data tasks run, for one rank."""

    cpus: float  # for the tasks of all ranks together
    selectors: tuple[dict[str, str], ...] = ()  # of labels, the best first; (): wherever Ray puts them
    words: str = "anywhere"
    on_group: bool = False  # the data group

    @property
    def options(self) -> dict[str, Any]:
        """For Ray tasks and actors."""
        if not self.selectors:
            return {}
        first, *others = self.selectors
        return {"label_selector": first, "fallback_strategy": [{"label_selector": each} for each in others]}


def worker_homes(machines: list[Machine], elastic: bool) -> tuple[list[Machine], dict[str, str] | None]:
    """The nodes that workers may take, and the label that they must carry, if that matters.

    GPU workers find their nodes by the GPU. Others keep to the train group where there is one; not those of an elastic run, for which
    Ray Train 2.60 counts the room without looking at labels, and would wait for workers that have none.
    """
    train = [machine for machine in machines if machine.group == TRAIN and machine.cpus > 0]
    if elastic or not train or any(machine.gpus for machine in machines):
        return machines, None
    return train, {GROUP: TRAIN}


def place_data(machines: list[Machine], claim: float, world: int, seats: Sequence[str] = (), own: str = "") -> DataPlace:
    """Where the data tasks of a rank on node `own` run, beside `world` workers that claim `claim` CPUs each.

    `seats`: the node id of each rank, where that is known. Without labels anywhere, as Ray spreads tasks. With them: on the data group, all of
    them, so that no core beside a worker is taken; if there is none, on the worker's own node, if each such node has its ranks' share of the CPUs. Its
    `cpus` may be 0 or less, where workers leave none.
    """
    left = {machine.id: machine.cpus - claim * seats.count(machine.id) for machine in machines}
    total = sum(machine.cpus for machine in machines) - claim * world
    if not any(machine.group for machine in machines):
        return DataPlace(total)
    group = [machine for machine in machines if machine.group == DATA and left[machine.id] > 0]
    if group:
        cpus = sum(left[machine.id] for machine in group)
        words = f"the data group: {_names([machine.name for machine in group])} ({in_cpus(cpus)})"
        return DataPlace(cpus, ({GROUP: DATA}, ANYWHERE), words, on_group=True)
    if own and all(left.get(node, 0.0) * world >= total * seats.count(node) for node in set(seats)):
        return DataPlace(total, ({GROUP: DATA}, {NODE_ID: own}, ANYWHERE), f"each worker's own node ({in_cpus(total)} in all), for no data node has CPUs to give")
    return DataPlace(total, ({GROUP: DATA}, ANYWHERE), f"anywhere ({in_cpus(total)}), for no data node has CPUs to give")


def seating(nodes: list[str], data: DataPlace, driver: str) -> str:
    """The line that tells where everything sits; `nodes`: the name of each rank's node."""
    ranks = {node: [rank for rank, own in enumerate(nodes) if own == node] for node in nodes}
    workers = ", ".join(f"{_ranks(own)} on {node}" for node, own in ranks.items())
    return f"worker{'s' if len(nodes) > 1 else ''} {workers}; data tasks: {data.words}; driver and controller on {driver}"


def _ranks(ranks: list[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return " and ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def in_cpus(count: float) -> str:
    """For people."""
    return f"{count:g} CPU" if count == 1 else f"{count:g} CPUs"


def _names(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
