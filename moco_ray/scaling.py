"""How fast a run would be on more GPUs than there are: arithmetic on the facts of a cluster.

Responsible for the time of a step and its parts, what bounds it, and the load of network and object store. Not responsible for the
facts (cluster_facts.py), for what is sent (traffic.py) nor for how it is told (show_scale.py). Pure: no torch, no Ray. Its errors on
two to four ranks: tests/bench/results/scaling.md.

A step of the busiest rank: the key encoder; the query encoder's forward, and behind it the gather of the keys; its backward, and
behind that the all-reduce of gradients by DDP's buckets; then what is fixed (optimizer, momentum). From the step's beginning on
the exchange of the next step's key crops, one all-to-all of uint8. What is begun first is sent first: keys wait for crops that are
still on their way, which is pessimistic where a network shares itself evenly. Input, and the saving of checkpoints, go on
beside the steps.
"""

import math
from typing import NamedTuple

from moco_ray.cluster_facts import ClusterFacts
from moco_ray.errors import UserError
from moco_ray.recipe import Recipe
from moco_ray.traffic import Load, Placed, Ring, buckets, unhidden

ROUNDS = 60  # of halving, in the search for the step's time


class Parts(NamedTuple):
    """Seconds of a step that nothing else hides, on the busiest rank. Their sum is the step."""

    encoder: float  # both, with loss, optimizer and momentum
    exchange: float  # of uint8 crops: what the forward passes of the step before do not hide
    gather: float  # of keys: what the queries' forward does not hide, but for the crops before them
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


def predict(load: Load, facts: ClusterFacts, gpus: int) -> Scale:
    """A run of this load on `gpus` GPUs. Raises UserError for more GPUs than BatchNorm groups, and where no core is left for input."""
    place, recipe = Placed(load, facts, gpus), load.plan.recipe
    batch = recipe.batch.global_batch_size
    wished = batch / path_seconds(place, input_bytes=0.0) * facts.input.core_seconds_per_image  # cores, if input is to keep up
    cores = max(0.0, place.nodes * facts.node.cores - gpus * facts.node.cores_per_worker)
    data_nodes = 0
    if wished > cores:  # then all of it is done by data nodes, for while there is one no data task runs elsewhere
        asked = min(facts.data_nodes.most, math.ceil(wished / facts.data_nodes.cores - 1e-9))
        if asked * facts.data_nodes.cores > cores:
            data_nodes, cores = asked, asked * facts.data_nodes.cores
    if not cores:
        each = f"node.cores {facts.node.cores:g} and node.cores_per_worker {facts.node.cores_per_worker:g}"
        raise UserError(f"no core is left for input: {each}; raise the first, or data_nodes.most")
    input_bytes = _input_bytes_of_node(place, data_nodes)
    path = path_seconds(place, input_bytes)
    storage_seconds = batch * facts.input.bytes_per_image / facts.input.storage_bytes_per_second
    input_seconds = max(batch * facts.input.core_seconds_per_image / cores, storage_seconds, input_bytes / facts.network.bytes_per_second)
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


def path_seconds(place: Placed, input_bytes: float) -> float:
    """A step when crops are always there. They come over the same network, which leaves the rest of it to the collectives."""
    least = sum(_parts(place, math.inf, 0.0))
    low, high = least, 2 * least + 2 * input_bytes / place.facts.network.bytes_per_second
    while sum(_parts(place, high, input_bytes)) > high:
        high *= 2
    for _ in range(ROUNDS):  # the longer the step, the less of the network the input takes: one time fits
        middle = (low + high) / 2
        low, high = (middle, high) if sum(_parts(place, middle, input_bytes)) > middle else (low, middle)
    return high


def _parts(place: Placed, step_seconds: float, input_bytes: float) -> Parts:
    """Of a step that takes so long, when a node receives `input_bytes` beside it. All but the wait for input."""
    load, facts, world = place.load, place.facts, place.world
    run = load.plan.recipe.run
    of_rows = load.directions * place.rows / facts.gpu.images_per_second
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

    inside = place.crops_leaving_rank / facts.link.bytes_per_second if place.ranks_of_node > 1 else 0.0
    between = place.crops_leaving_node / left if place.nodes > 1 else 0.0
    exchange = load.directions * place.partners() * latency + max(inside, between)
    exchange, gather, all_reduce = _unhidden(place, ring, exchange, of_rows)
    looks = 3 / run.dictionary_every_steps if run.dictionary_every_steps else 0.0
    signals = (1 + looks) * ring.reduce_seconds(0) + 5 / run.log_every_steps * ring.gather_seconds(0)
    return Parts(encoder, exchange, gather, all_reduce, signals, checkpoint, 0.0)


def _unhidden(place: Placed, ring: Ring, exchange: float, of_rows: float) -> tuple[float, float, float]:
    """Seconds of the exchange, of the gather and of the all-reduce that are waited for. The exchange takes `exchange` from the step's
    beginning on; `of_rows` are computed.
    """
    load, facts, passes = place.load, place.facts.gpu, place.rows_of_passes
    forward, backward = (1 - facts.backward_share) / 2 * of_rows, facts.backward_share * of_rows  # of all keys, and as long of all queries
    first, last = (rows / place.rows / load.directions for rows in (passes[0], passes[-1]))
    gather = load.directions * ring.gather_seconds(place.rows * load.key_bytes)

    wait = max(0.0, max(0.0, exchange - forward) + gather - forward * first)  # the first pass of queries is over, and its keys are not there
    of_gather = min(gather, wait)
    return wait - of_gather, of_gather, unhidden([size * load.gradient_wire for size in buckets(load.gradients)], ring, backward * last)


def _bound(parts: Parts) -> str:
    if parts.input:
        return "input"
    return max(zip(parts, parts._fields, strict=True))[1].replace("_", "-")


def _input_bytes_of_node(place: Placed, data_nodes: int) -> float:
    """Bytes that a GPU node receives for the crops of a step: those made elsewhere, and the images that it decodes itself."""
    facts, crops = place.facts.input, place.rows_of_node * 2 * place.load.crop_bytes
    if data_nodes:
        return crops
    elsewhere = facts.share_from_other_nodes if place.nodes > 1 else 0.0
    return crops * elsewhere + place.load.plan.recipe.batch.global_batch_size / place.nodes * facts.bytes_per_image


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
