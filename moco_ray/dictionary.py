"""The health of the dictionary, measured in the step: what the loss does not tell.

Responsible for the numbers, on the device, every `run.dictionary_every_steps` steps, the same for every number of ranks
to the order of sums. Not responsible for what they mean (verdicts.py). N own rows, B rows of all ranks, C features,
K queued keys, n rows a BatchNorm group; q and the keys are unit rows.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moco_ray.method.contrast import LOWEST_PLAIN_TEMPERATURE, chunk_keys
from moco_ray.method.queue import EMPTY, Queue
from moco_ray.plan import Plan, groups_of_rank
from moco_ray.ranks import Ranks

AGES = ("mass_newest", "mass_newer", "mass_older", "mass_oldest")
UNIFORMITY_ROWS = 1024  # of the step's keys at the most: all their pairs are looked at
SAMPLED_VALUES = 1024  # of each parameter, to see whether it moves


class Sample(NamedTuple):
    """The first key group of a step, kept until its keys leave the queue. On rank 0."""

    step: int
    encode: Callable[[], Tensor]  # its n,C keys by the key encoder of today
    keys: Tensor  # n,C as they were put into the queue


class Dictionary:
    """What one rank measures. All ranks make the same calls at the same steps."""

    def __init__(self, plan: Plan, ranks: Ranks, rows_of_slots: Callable[[Queue], Tensor] | None = None):
        """`rows_of_slots(queue)`: K int64, the data set's row that each queued key is of, -1 if unknown. None: unknown."""
        self._plan, self._ranks, self._rows_of_slots = plan, ranks, rows_of_slots
        self._every = plan.recipe.run.dictionary_every_steps
        self._turn = max(1, plan.recipe.contrast.queue_keys // plan.keys_per_step)  # steps until a step's keys begin to leave
        self._sample: Sample | None = None
        self._values: dict[str, Tensor] = {}  # scalars on the device, since the last `take`
        self._before: Tensor | None = None

    def due(self, step: int) -> bool:
        """Whether step 0, 1, .. is measured."""
        return bool(self._every) and (step + 1) % self._every == 0

    def samples(self, step: int) -> bool:
        """Whether the first key group of this step is to be kept (`keep`)."""
        return bool(self._every) and self._ranks.is_first and step % max(self._turn, self._every) == 0

    def keep(self, sample: Sample) -> None:
        self._sample = sample

    @torch.no_grad()
    def measure(self, step: int, q: Tensor, keys: Tensor, rows: Tensor, f_q: nn.Module, f_k: nn.Module, queue: Queue) -> None:
        """Before the update and the enqueue of a step that is due. Collective.

        q N,C of own rows, in order; keys B,C of all rows, in order; rows N, the own rows' numbers in the data set.
        """
        plan, counts = self._plan, self._plan.recipe.batch
        own = groups_of_rank(plan.groups, self._ranks.world, self._ranks.rank).start * counts.bn_group_size
        sums = against_step(q, keys, own, counts.bn_group_size)
        slots = self._rows_of_slots(queue) if self._rows_of_slots else None
        sums |= against_queue(q, keys[own : own + len(q)], queue, plan.recipe.contrast.temperature, slots, rows.to(q.device))
        names = list(sums)
        sums = dict(zip(names, self._ranks.sum(torch.stack([sums[name] for name in names])), strict=True))
        if queue.filled < len(queue):  # random vectors are among the keys
            for name in AGES:
                del sums[name]
        values = {**rates(sums, counts.global_batch_size), **of_keys(keys)}
        values |= {"parameter_distance": distance(f_q, f_k), "weight_norm": norm(f_q.parameters())}
        values |= ages(queue, step, plan.steps_per_epoch)
        values["queues_equal"] = self._ranks.equal(queue.fingerprint()).to(q.dtype)
        self._values |= values
        self._before = some_values(f_k)

    @torch.no_grad()
    def moved(self, f_k: nn.Module) -> None:
        """After the momentum update of a step that was measured."""
        now = some_values(f_k)
        self._values["key_moved_share"] = (now != self._before).to(now.dtype).mean()
        self._before = None

    @torch.no_grad()
    def leave(self, completed: int) -> None:
        """After each step: re-encode the kept keys if they are about to leave the queue."""
        if self._sample is None or completed < self._sample.step + self._turn:
            return
        sample, self._sample = self._sample, None
        self._values["drift"] = (sample.encode() * sample.keys).sum(1).mean()

    def take(self) -> dict[str, float]:
        """What was measured since the last call, but for what is not finite. Waits for the device."""
        names, self._values, held = list(self._values), {}, self._values
        values = torch.stack([held[name].double() for name in names]).tolist() if names else []
        return {name: value for name, value in zip(names, values, strict=True) if math.isfinite(value)}


def against_step(q: Tensor, keys: Tensor, own: int, n: int) -> dict[str, Tensor]:
    """Sums over the own rows, which begin at row `own`, of their similarities to the keys B,C of their own step.

    A mate of a query is another row of its BatchNorm group of n; the keys of both are of the same age, so that
    staleness cannot tell them apart from the other rows' keys (mate_z).
    """
    similarity = q @ keys.T  # N,B
    row = torch.arange(len(q), device=q.device)
    positive = similarity[row, own + row]
    others = torch.ones_like(similarity, dtype=torch.bool)
    others[row, own + row] = False
    column = torch.arange(len(keys), device=q.device)
    mates = others & ((own + row)[:, None] // n == column[None] // n)
    beaten = ((similarity >= tie(positive)[:, None]) & others).any(1)
    strangers = others & ~mates
    return {
        "positive": positive.sum(),
        "fresh_right": (~beaten).to(q.dtype).sum(),
        "others": (similarity * others).sum(),
        "others_count": others.sum().to(q.dtype),
        "others_squares": (similarity.square() * others).sum(),
        "mates": (similarity * mates).sum(),
        "mates_count": mates.sum().to(q.dtype),
        "strangers": (similarity * strangers).sum(),
        "strangers_count": strangers.sum().to(q.dtype),
    }


def against_queue(
    q: Tensor, k: Tensor, queue: Queue, temperature: float, slots: Tensor | None = None, rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Sums over the own rows of what they see in the queue, in chunks of it; k N,C are the own keys.

    The shares of the softmax's mass on the queued keys, by quarter of their age, and, if `slots` (K, rows of the data
    set) is given, on older keys of the query's own image. A pass of its own: the loss's cuts lie where memory wants them,
    not between ages, and what is asked of the own image needs each weight.
    """
    size, step = len(queue), chunk_keys(len(q), q.device)
    greatest = q.new_ones(())  # similarity; its weight is 1
    if temperature < LOWEST_PLAIN_TEMPERATURE:  # all weights could vanish beside that of a similarity of 1
        greatest = torch.stack([(q @ keys.T).amax(1) for keys in queue.keys.split(step)]).amax(0)[:, None]
    lowest = tie((q * k).sum(1))[:, None]
    mass = q.new_zeros(len(q), len(AGES))
    own_mass, own_count = q.new_zeros(len(q)), q.new_zeros(len(q))
    beaten = torch.zeros(len(q), dtype=torch.bool, device=q.device)
    for quarter in range(len(AGES)):
        for part in slices_of_age(size, queue.position, quarter):
            for start in range(part.start, part.stop, step):
                chunk = slice(start, min(start + step, part.stop))
                similarity = q @ queue.keys[chunk].T  # N,chunk
                beaten |= (similarity >= lowest).any(1)
                weights = similarity.sub_(greatest).div_(temperature).exp_()
                mass[:, quarter] += weights.sum(1)
                if slots is not None:
                    same = (slots[chunk][None] == rows[:, None]) & (queue.steps[chunk] != EMPTY)[None]
                    own_mass += (weights * same).sum(1)
                    own_count += same.sum(1)
    total = mass.sum(1).clamp(min=torch.finfo(q.dtype).tiny)
    sums = {"queue_right": (~beaten).to(q.dtype).sum()}
    sums |= dict(zip(AGES, (mass / total[:, None]).sum(0), strict=True))
    if slots is not None:
        sums |= {"own_image_mass": (own_mass / total).sum(), "own_image_keys": own_count.sum()}
    return sums


def slices_of_age(size: int, position: int, quarter: int) -> list[slice]:
    """The slots of a full queue that hold a quarter of its keys by age, 0 the newest; `position` is where the next key goes."""
    first, stop = (size * edge // len(AGES) for edge in (len(AGES) - 1 - quarter, len(AGES) - quarter))  # from the oldest
    first, stop = position + first, position + stop
    if stop <= size:
        return [slice(first, stop)]
    if first >= size:
        return [slice(first - size, stop - size)]
    return [slice(first, size), slice(0, stop - size)]


def rates(sums: dict[str, Tensor], batch: int) -> dict[str, Tensor]:
    """Scalars of the whole batch from the sums over its rows."""
    positive, others = sums["positive"] / batch, sums["others"] / sums["others_count"]
    variance = sums["others_squares"] / sums["others_count"] - others.square()
    gap = sums["mates"] / sums["mates_count"] - sums["strangers"] / sums["strangers_count"]  # nan with one group
    queue_top1, fresh_top1 = sums["queue_right"] / batch, sums["fresh_right"] / batch
    means = {name: sums[name] / batch for name in (*AGES, "own_image_mass", "own_image_keys") if name in sums}
    return {
        "queue_top1": queue_top1,
        "fresh_top1": fresh_top1,
        "top1_gap": queue_top1 - fresh_top1,
        "step_positive_similarity": positive,
        "step_similarity": others,
        "mate_z": gap / variance.clamp(min=torch.finfo(variance.dtype).eps).sqrt(),
        **means,
    }


def of_keys(keys: Tensor) -> dict[str, Tensor]:
    """How the step's keys B,C fill the sphere: effective rank, spread, uniformity.

    Effective rank: exp of the entropy of the normalised singular values (RankMe, Garrido et al. 2023), 1 to C. Spread:
    mean over dimensions of the standard deviation, times sqrt(C): 1 when even, 0 when all are one. Uniformity: log of
    the mean over pairs of exp(-2 distance²) (Wang and Isola 2020), 0 when all are one. Of the step's keys and not the
    queue's: the queue's are spread by their ages alone.
    """
    wide = keys.double() if keys.device.type == "cpu" else keys.float()
    try:
        singular = torch.linalg.eigvalsh(wide.T @ wide).clamp(min=0).sqrt()
    except torch.linalg.LinAlgError:  # keys that are not finite: the step will be refused, in its own words
        singular = wide.new_full((wide.shape[1],), float("nan"))
    share = singular / singular.sum()
    some = wide[:UNIFORMITY_ROWS]
    squares = 2 - 2 * (some @ some.T)
    pairs = torch.ones_like(squares, dtype=torch.bool).triu(1)
    return {
        "effective_rank": torch.special.entr(share).sum().exp(),
        "key_spread": wide.std(0, correction=0).mean() * math.sqrt(keys.shape[1]),
        "uniformity": (squares[pairs] * -2).exp().mean().log(),
    }


def distance(f_q: nn.Module, f_k: nn.Module) -> Tensor:
    """|θ_q - θ_k| / |θ_q|."""
    pairs = zip(f_q.parameters(), f_k.parameters(), strict=True)
    return torch.stack([torch.dist(a.detach(), b) for a, b in pairs]).norm() / norm(f_q.parameters())


def norm(values: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all values, one tensor at a time."""
    return torch.stack([torch.linalg.vector_norm(value.detach()) for value in values]).norm()


def some_values(module: nn.Module) -> Tensor:
    """The first values of each parameter, in the order in which memory holds them (any layout), copied."""
    held = [parameter.detach() for parameter in module.parameters()]
    return torch.cat([one.as_strided((min(one.numel(), SAMPLED_VALUES),), (1,)) for one in held])


def ages(queue: Queue, step: int, steps_per_epoch: int) -> dict[str, Tensor]:
    """Oldest and mean age of the queued keys when the queries of `step` meet them: 1 for those of the step before. nan if there are none."""
    held = queue.steps != EMPTY
    age = (step - queue.steps).double()
    oldest = torch.where(held, age, age.new_tensor(float("nan"))).nan_to_num(nan=-1).max()
    oldest = torch.where(oldest < 0, oldest.new_tensor(float("nan")), oldest)
    mean = (age * held).sum() / held.sum()
    return {
        "oldest_key_age_steps": oldest,
        "mean_key_age_steps": mean,
        "oldest_key_age_epochs": oldest / steps_per_epoch,
        "mean_key_age_epochs": mean / steps_per_epoch,
    }


def tie(positive: Tensor) -> Tensor:
    """Similarities from which on a key counts as similar as the own one: equal keys differ by rounding alone."""
    return positive - 8 * torch.finfo(positive.dtype).eps


class Duplicates:
    """The share of images whose bytes are another row's too, in the sample of the data set that segment.py hashes. On rank 0.

    Of an image all copies are in the sample, or none. Counts what this start of the run has seen: all of them after an epoch.
    """

    def __init__(self):
        self._row_of: dict[int, int] = {}  # the first row with such bytes
        self._copies: set[int] = set()

    def share(self, seen: Iterable[tuple[int, int]]) -> float:
        """With these added: rows that repeat an earlier one, of all in the sample, 0 to 1."""
        for content, row in seen:
            if self._row_of.setdefault(content, row) != row:
                self._copies.add(row)
        return len(self._copies) / max(1, len(self._row_of) + len(self._copies))
