"""How fast a run would be on more GPUs than there are: arithmetic on the facts of a cluster.

Responsible for the time of a step and its parts, what bounds it, and the load of network and object store, from the bytes that
the code really sends (train.py, ranks.py, method/shuffle.py). Not responsible for the facts (cluster_facts.py) nor for how it is
told (show_scale.py). Pure: no torch, no Ray. Its errors on one to four ranks: tests/bench/scaling.py.

A step of the busiest rank, in order: the crops of the key views (one all-to-all of uint8), the key encoder, the gather of the
keys, the query encoder, and behind its backward the all-reduce of gradients by DDP's buckets. Input, and the saving of
checkpoints, go on beside the steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moco_ray.cluster_facts import ClusterFacts
from moco_ray.plan import Plan, groups_of_rank
from moco_ray.recipe import Recipe

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's own
ROUNDS = 60  # of halving, in the search for the step's time


@dataclass(frozen=True)
class Load:
    """What a step of a recipe computes and sends, on any cluster."""

    plan: Plan
    gradients: tuple[int, ...]  # bytes of each parameter's gradient, in the model's order

    @property
    def directions(self) -> int:
        return 2 if self.plan.recipe.contrast.symmetric else 1

    @property
    def crop_bytes(self) -> int:
        """Of one view of a row, uint8."""
        return 3 * self.plan.recipe.augment.image_pixels**2

    @property
    def key_bytes(self) -> int:
        recipe = self.plan.recipe.encoder
        return recipe.feature_dim * (8 if recipe.precision == "float64" else 4)

    @property
    def gradient_bytes(self) -> int:
        return sum(self.gradients)

    @property
    def checkpoint_bytes(self) -> int:
        """Both encoders and the momentum, and the queue."""
        return 3 * self.gradient_bytes + int(self.plan.facts()["queue_bytes"])


class Parts(NamedTuple):
    """Seconds of a step that nothing else hides, on the busiest rank. Their sum is the step."""

    encoder: float
    exchange: float  # of uint8 crops
    gather: float  # of keys
    all_reduce: float  # of gradients: what the backward does not hide
    signals: float  # small collectives: sums for the record, the look at the dictionary, the queue's fingerprint
    checkpoint: float  # the copy to host memory, as a mean over steps
    input: float  # waits for crops, or for the storage


class Scale(NamedTuple):
    """A run on so many GPUs."""

    gpus: int
    nodes: int
    data_nodes: int
    parts: Parts
    bound: str  # the part that takes most of the step; "input" wherever it is waited for
    images_per_second: float
    efficiency: float  # of so many times one GPU's rate
    store_bytes: int  # of the object store of a GPU node
    store_bytes_per_second: float  # crops put there, or brought
    network_bytes_per_second: float  # received by a GPU node; it sends about as much, less its input
    network_share: float  # of what its network gives
    saves_skipped: bool  # saving a checkpoint takes longer than the recipe's interval between two
    hours: float  # of the run, restarts included; inf where it would lose more to them than it gains
    money: float

    @property
    def step_seconds(self) -> float:
        return sum(self.parts)


class Ring(NamedTuple):
    """Ranks of one collective, and the slowest link between neighbours."""

    world: int
    bytes_per_second: float
    latency_seconds: float

    def gather_seconds(self, bytes_of_each: float) -> float:
        """All-gather in a ring: each passes on the others'."""
        return (self.world - 1) * (self.latency_seconds + bytes_of_each / self.bytes_per_second)

    def reduce_seconds(self, size: float) -> float:
        """All-reduce of so many bytes: twice round a ring for the bytes, a tree's depth for the latency, as NCCL chooses."""
        return 2 * math.ceil(math.log2(self.world)) * self.latency_seconds + sent_by_all_reduce(size, self.world) / self.bytes_per_second


def sent_by_all_reduce(size: float, world: int) -> float:
    """Bytes that each rank of a ring sends, and receives."""
    return 2 * (world - 1) / world * size


def buckets(gradients: Sequence[int]) -> list[int]:
    """Bytes of DDP's buckets in the order they are sent: gradients come from the last layer on; a bucket closes at its limit."""
    found, filled = [], 0
    for size in reversed(gradients):
        filled += size
        if filled >= (BUCKET_BYTES if found else FIRST_BUCKET_BYTES):
            found.append(filled)
            filled = 0
    return found + [filled] if filled else found


def unhidden_reduce_seconds(sizes: Sequence[int], ring: Ring, backward_seconds: float) -> float:
    """What is left of the all-reduces of these buckets when the backward ends; gradients come evenly over it, by bytes.

    That is pessimistic for a ResNet: its last layers, whose gradients come first, have most parameters and little work.
    """
    done, ready = 0.0, 0
    for size in sizes:
        ready += size
        done = max(done, backward_seconds * ready / sum(sizes)) + ring.reduce_seconds(size)
    return max(0.0, done - backward_seconds)


def rows_leaving(plan: Plan, groups: range) -> float:
    """Mean rows of these consecutive groups that a step's shuffle sends to other groups than these, for one direction.

    The permutation is balanced: a group has as many rows from each group of its domain.
    """
    n, size = plan.recipe.batch.bn_group_size, plan.recipe.batch.shuffle_domain_groups or plan.groups
    leaving = 0.0
    for domain in range(groups.start // size, math.ceil(groups.stop / size)):
        inside = min(groups.stop, (domain + 1) * size) - max(groups.start, domain * size)
        leaving += inside * n * (1 - inside / size)
    return leaving


def groups_of_ranks(plan: Plan, world: int, first: int, count: int) -> range:
    """The run of groups that `count` ranks own together."""
    return range(groups_of_rank(plan.groups, world, first).start, groups_of_rank(plan.groups, world, first + count - 1).stop)


@dataclass(frozen=True)
class _Place:
    """A load dealt out over the GPUs of a cluster: bytes of the busiest rank and node, whatever the time they take."""

    load: Load
    facts: ClusterFacts
    world: int

    def __post_init__(self):
        self.load.plan.refuse_world(self.world)

    @property
    def nodes(self) -> int:
        return math.ceil(self.world / self.facts.node.gpus)

    @property
    def ranks_of_node(self) -> int:
        return min(self.world, self.facts.node.gpus)

    @property
    def rows(self) -> int:
        """Of the rank that has most."""
        return len(groups_of_rank(self.load.plan.groups, self.world, 0)) * self.load.plan.recipe.batch.bn_group_size

    @property
    def rows_of_node(self) -> int:
        return len(groups_of_ranks(self.load.plan, self.world, 0, self.ranks_of_node)) * self.load.plan.recipe.batch.bn_group_size

    def crops_leaving(self, ranks: int) -> float:
        """Bytes that the busiest of all runs of so many ranks sends to others in a step's shuffles."""
        starts = range(0, self.world, ranks)
        runs = (groups_of_ranks(self.load.plan, self.world, first, min(ranks, self.world - first)) for first in starts)
        return self.load.directions * self.load.crop_bytes * max(rows_leaving(self.load.plan, run) for run in runs)

    def collective_bytes_of_node(self) -> float:
        """Bytes that the busiest node receives in a step by collectives, of its network."""
        if self.nodes == 1:
            return 0.0
        keys = (self.world - 1) * self.rows * self.load.key_bytes * self.load.directions
        return self.crops_leaving(self.ranks_of_node) + keys + sent_by_all_reduce(self.load.gradient_bytes, self.world)

    def partners(self) -> int:
        """Other ranks with which the busiest one exchanges rows."""
        size = self.load.plan.recipe.batch.shuffle_domain_groups or self.load.plan.groups
        return min(self.world - 1, math.ceil(size * self.world / self.load.plan.groups), self.rows)


def predict(load: Load, facts: ClusterFacts, gpus: int) -> Scale:
    """A run of this load on `gpus` GPUs. Raises UserError if there are more GPUs than BatchNorm groups."""
    place, recipe = _Place(load, facts, gpus), load.plan.recipe
    batch = recipe.batch.global_batch_size
    core_seconds = facts.input.core_seconds_per_image
    own_cores = place.nodes * facts.node.cores - gpus * facts.node.cores_per_worker
    wished = batch / path_seconds(place, input_bytes=0.0)  # images/s if input kept up
    lacking = max(0.0, wished * core_seconds - max(0.0, own_cores))
    data_nodes = min(facts.data_nodes.most, math.ceil(lacking / facts.data_nodes.cores - 1e-9))
    cores = max(0.0, own_cores) + data_nodes * facts.data_nodes.cores
    input_bytes = _input_bytes_of_node(place, data_nodes, cores)
    path = path_seconds(place, input_bytes)
    storage_seconds = batch * facts.input.bytes_per_image / facts.input.storage_bytes_per_second
    input_seconds = max(batch * core_seconds / cores if cores else math.inf, storage_seconds, input_bytes / facts.network.bytes_per_second)
    step = max(path, input_seconds)
    parts = _parts(place, step, input_bytes)
    if input_seconds > path:
        parts = parts._replace(input=max(0.0, step - sum(parts)))
    due, saving = saves_every_seconds(recipe, step), load.checkpoint_bytes / facts.checkpoint.save_bytes_per_second
    every = max(due, saving)
    received = input_bytes + place.collective_bytes_of_node()
    hours = load.plan.total_steps * step / 3600
    lost = place.nodes * facts.restarts.per_node_hour * (facts.restarts.seconds + every / 2) / 3600
    hours = hours / (1 - lost) if lost < 1 else math.inf
    price = facts.price
    return Scale(
        gpus, place.nodes, data_nodes, parts, _bound(parts), batch / step,
        batch / step / (gpus * facts.gpu.images_per_second / load.directions),
        load.plan.object_store_bytes(gpus, tasks_in_flight(cores, gpus)) * place.ranks_of_node,
        place.rows_of_node * 2 * load.crop_bytes / step,
        received / step, received / step / facts.network.bytes_per_second,
        saving > due, hours, hours * (price.head + place.nodes * price.gpu_node + data_nodes * price.data_node),
    )  # fmt: skip


def path_seconds(place: _Place, input_bytes: float) -> float:
    """A step when crops are always there. They come over the same network, which leaves the rest of it to the collectives."""
    least = sum(_parts(place, math.inf, 0.0))
    low, high = least, 2 * least + 2 * input_bytes / place.facts.network.bytes_per_second
    while sum(_parts(place, high, input_bytes)) > high:
        high *= 2
    for _ in range(ROUNDS):  # the longer the step, the less of the network the input takes: one time fits
        middle = (low + high) / 2
        low, high = (middle, high) if sum(_parts(place, middle, input_bytes)) > middle else (low, middle)
    return high


def _parts(place: _Place, step_seconds: float, input_bytes: float) -> Parts:
    """Of a step that takes so long, when a node receives `input_bytes` beside it. All but the wait for input."""
    load, facts, world = place.load, place.facts, place.world
    run, rows = load.plan.recipe.run, place.rows
    of_rows = load.directions * rows / facts.gpu.images_per_second
    encoder = facts.gpu.fixed_seconds + of_rows
    every = saves_every_seconds(load.plan.recipe, step_seconds) if math.isfinite(step_seconds) else math.inf
    copying = load.checkpoint_bytes / facts.checkpoint.copy_bytes_per_second
    checkpoint = copying * step_seconds / every if math.isfinite(every) else copying / run.checkpoint_every_steps
    if world == 1:
        return Parts(encoder, 0.0, 0.0, 0.0, 0.0, checkpoint, 0.0)
    left = facts.network.bytes_per_second - input_bytes / step_seconds
    if left <= 0:
        return Parts(encoder, math.inf, math.inf, math.inf, 0.0, checkpoint, 0.0)
    rate = facts.link.bytes_per_second if place.nodes == 1 else left
    if place.nodes > 1 and place.ranks_of_node > 1:
        rate = min(rate, facts.link.bytes_per_second)
    latency = (facts.link if place.nodes == 1 else facts.network).latency_seconds
    ring = Ring(world, rate, latency)

    inside = place.crops_leaving(1) / facts.link.bytes_per_second if place.ranks_of_node > 1 else 0.0
    between = place.crops_leaving(place.ranks_of_node) / left if place.nodes > 1 else 0.0
    exchange = load.directions * place.partners() * latency + max(inside, between)
    gather = load.directions * ring.gather_seconds(rows * load.key_bytes)
    own_groups = rows // load.plan.recipe.batch.bn_group_size
    last = min(own_groups, run.groups_per_forward or own_groups) / own_groups / load.directions  # of the rows, in the pass that reduces
    backward = facts.gpu.backward_share * of_rows * last
    all_reduce = unhidden_reduce_seconds(buckets(load.gradients), ring, backward)
    looks = 3 / run.dictionary_every_steps if run.dictionary_every_steps else 0.0
    signals = (1 + looks) * ring.reduce_seconds(0) + 5 / run.log_every_steps * ring.gather_seconds(0)
    return Parts(encoder, exchange, gather, all_reduce, signals, checkpoint, 0.0)


def _bound(parts: Parts) -> str:
    if parts.input:
        return "input"
    return max(zip(parts, parts._fields, strict=True))[1].replace("_", "-")


def _input_bytes_of_node(place: _Place, data_nodes: int, cores: float) -> float:
    """Bytes that a GPU node receives for the crops of a step: those made elsewhere, and the images that it decodes itself."""
    facts, batch = place.facts, place.load.plan.recipe.batch.global_batch_size
    on_data_nodes = data_nodes * facts.data_nodes.cores / cores if cores else 0.0
    alone = place.nodes + data_nodes == 1
    elsewhere = 0.0 if alone else max(facts.input.share_from_other_nodes, on_data_nodes)
    decoded = batch * (1 - on_data_nodes) / place.nodes
    return place.rows_of_node * elsewhere * 2 * place.load.crop_bytes + decoded * facts.input.bytes_per_image


def tasks_in_flight(data_cpus: float, ranks: int) -> int:
    """Data tasks at work for each rank, reading object storage: as data/stream.py has it."""
    return max(1, int(data_cpus / ranks * 2))


def saves_every_seconds(recipe: Recipe, step_seconds: float) -> float:
    """Time between two checkpoints: by steps, and by the clock at the latest."""
    by_clock = recipe.run.checkpoint_every_minutes * 60 or math.inf
    return min(recipe.run.checkpoint_every_steps * step_seconds, by_clock)


def recipe_for(recipe: Recipe, gpus: int) -> Recipe:
    """The recipe itself for at most as many GPUs as BatchNorm groups, else ANOTHER one with a group for each GPU.

    Its batch, learning rate and steps are scaled linearly, the epochs stay. Nobody has measured what that costs in accuracy.
    """
    if gpus <= recipe.batch.groups:
        return recipe
    times = gpus / recipe.batch.groups
    values = recipe.model_dump(exclude_unset=True)
    values.setdefault("batch", {})["global_batch_size"] = gpus * recipe.batch.bn_group_size
    values["batch"]["bn_group_size"] = recipe.batch.bn_group_size
    values.setdefault("optimizer", {})["learning_rate"] = recipe.optimizer.learning_rate * times
    for key in ("steps", "warmup_steps"):
        if getattr(recipe.schedule, key):
            values["schedule"][key] = max(1, round(getattr(recipe.schedule, key) / times))
    return Recipe.parse(values, f"{gpus} GPUs, a BatchNorm group for each")
