"""What ails a run, in plain words: a table of named conditions over its records, each with what was seen, what it means
and what to change.

Responsible for the conditions, and for which silences which. Pure: `judge` over a metrics.jsonl gives what `Watch` gave
while it was written. Not responsible for the numbers (dictionary.py) nor for telling (desk.py, monitor.py). The
thresholds are where the runs of tests/ill_runs.py part from the healthy ones; README tells how far apart they are.
"""

from collections import deque
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, NamedTuple

from moco_ray.plan import Plan

LOOKS = 5  # records with the dictionary's health, over which a condition must hold in the mean
STALE_GAP, STALE_RATIO = 0.2, 5.0  # top-1 against the queue above top-1 against the step: difference, and ratio
FOLLOWS_CLOSELY = 0.2  # |θq-θk|/|θq| below which the key encoder is near: staleness is then of its speed, not of the query's
SPREAD, ALIGNED = 0.1, 0.02  # of the step's keys; of the positive above the step's other keys
RAN_AWAY = 0.3  # |θq-θk|/|θq|: healthy runs stay below 0.15
SHRUNK = 0.5  # of the first weight norm
LEAK = 0.3  # |mate z|; healthy runs reach 0.23 with groups of 4 rows, 0.16 with groups of 8
STANDS_STILL = 0.05  # share of key-encoder values that a step moves
OWN_KEYS = 0.5  # older keys of its own image that a query meets
COPIES = 0.01  # share of images
CHANCE, CHANCE_TURNS = 0.97, 10  # of log(K+1), for so many turns of the queue
CHANCE_STEPS = 100  # after the warm-up: a small queue turns in a step or two
WAITING = 0.2  # share of the time
FILLING = 0.5  # of the run
LOOKED_AT = {  # in a record that holds a look at the dictionary; what was not finite is missing (Dictionary.take), and such a look tells nothing
    "queues_equal", "queue_top1", "fresh_top1", "step_positive_similarity", "step_similarity", "key_spread", "key_moved_share",
    "parameter_distance", "weight_norm",
}  # fmt: skip


class Verdict(NamedTuple):
    """One condition, raised at a step."""

    name: str
    step: int
    seen: str
    means: str
    change: str

    @property
    def text(self) -> str:
        """In one line."""
        return f"{self.name.replace('_', ' ')}: {self.seen}. {self.means}. {self.change}"


class Finding(NamedTuple):
    """What a condition says where it holds."""

    seen: str
    means: str
    change: str


SILENCES = {  # a cause, and the symptoms that it explains
    "queues_differ": {"learning_rate_too_high", "stale_dictionary", "collapse", "loss_at_chance"},
    "learning_rate_too_high": {"key_encoder_frozen", "stale_dictionary", "collapse", "loss_at_chance"},
    "key_encoder_frozen": {"stale_dictionary", "collapse", "loss_at_chance"},
    "stale_dictionary": {"collapse", "loss_at_chance"},
    "collapse": {"stale_dictionary", "loss_at_chance"},
    "false_negatives": {"queue_not_filled"},
}


class Watch:
    """The verdicts of one run, record by record. Each is raised once."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.verdicts: list[Verdict] = []
        self.step, self.fill = 0, 0.0
        self.first_weight_norm = 0.0
        self.farthest = 0.0  # |θq-θk|/|θq| so far
        self.full: deque[dict[str, Any]] = deque(maxlen=LOOKS)  # the last looks at a dictionary of real keys alone
        self.looks: deque[dict[str, Any]] = deque(maxlen=LOOKS)  # the last looks
        self.records: deque[dict[str, Any]] = deque(maxlen=LOOKS)

    @property
    def state(self) -> str:
        """"ill" with a verdict, else "filling" while the queue holds random vectors, else "healthy"."""
        return "ill" if self.verdicts else "filling" if self.fill < 1 else "healthy"

    def look(self, entry: dict[str, Any]) -> list[Verdict]:
        """The verdicts that this record of metrics.jsonl raises. Records come in the order of their steps; others than training's say nothing."""
        if "loss" not in entry or "queue_fill" not in entry:
            return []
        self.step, self.fill = entry["step"], entry["queue_fill"]
        self.records.append(entry)
        if entry.keys() >= LOOKED_AT:
            self.first_weight_norm = self.first_weight_norm or entry["weight_norm"]
            self.farthest = max(self.farthest, entry["parameter_distance"])
            self.looks.append(entry)
            if entry["queue_fill"] >= 1:
                self.full.append(entry)
        raised = []
        for name, condition in CONDITIONS.items():
            if self._silenced(name):
                continue
            finding = condition(self)
            if finding:
                raised.append(self._raise(name, *finding))
        return raised

    def stopped_not_finite(self, step: int, why: str) -> list[Verdict]:
        """The verdict on a run that stopped itself; `why` is what it said."""
        name = "learning_rate_too_high"
        return [] if self._silenced(name) else [self._raise(name, why, "The run stopped itself, nothing of that step was kept", RATE_CURE, step)]

    def health(self) -> dict[str, Any]:
        """What health.json holds."""
        return {"step": self.step, "state": self.state, "verdicts": [verdict._asdict() for verdict in self.verdicts]}

    def mean(self, name: str, looks: deque[dict[str, Any]]) -> float:
        return fmean(entry[name] for entry in looks)

    def _silenced(self, name: str) -> bool:
        return any(name == one.name or name in SILENCES.get(one.name, ()) for one in self.verdicts)

    def _raise(self, name: str, seen: str, means: str, change: str, step: int | None = None) -> Verdict:
        verdict = Verdict(name, self.step if step is None else step, seen, means, change)
        self.verdicts.append(verdict)
        return verdict


def judge(entries: list[dict[str, Any]], plan: Plan) -> list[Verdict]:
    """Those raised over a whole metrics.jsonl, in the order of their steps."""
    watch = Watch(plan)
    for entry in entries:
        watch.look(entry)
    return watch.verdicts


RATE_CURE = "Start a new run with a lower optimizer.learning_rate (of sgd, 0.03 at batch 256 is the published one) or a longer schedule.warmup_steps"


def _queues_differ(watch: Watch) -> Finding | None:
    if watch.records[-1].get("queues_equal", 1.0) >= 1:
        return None
    return Finding(
        "the ranks hold different queues",
        "Each learns against another dictionary: this is a fault in moco_ray, or in the memory of a machine",
        "Resume from the newest checkpoint (it was written while they were equal); if it comes again, leave that machine out",
    )


def _collapsed(watch: Watch) -> bool:
    if len(watch.full) < LOOKS:
        return False
    aligned = watch.mean("step_positive_similarity", watch.full) - watch.mean("step_similarity", watch.full)
    return watch.mean("key_spread", watch.full) < SPREAD and aligned < ALIGNED


def _shrunk(watch: Watch) -> bool:
    return watch.looks[-1]["weight_norm"] < SHRUNK * watch.first_weight_norm


def _learning_rate_too_high(watch: Watch) -> Finding | None:
    if not _collapsed(watch) or watch.farthest < RAN_AWAY or _shrunk(watch):
        return None
    return Finding(
        f"all keys of a step are nearly one (spread {watch.mean('key_spread', watch.full):.3f} of 1), and the query encoder ran up to "
        f"{watch.farthest:.0%} of its weights' norm away from the key encoder",
        "The first steps were so long that they destroyed the features",
        RATE_CURE,
    )


def _key_encoder_frozen(watch: Watch) -> Finding | None:
    if len(watch.looks) < LOOKS or watch.mean("key_moved_share", watch.looks) > STANDS_STILL:
        return None
    if watch.looks[-1]["parameter_distance"] < 1e-4:  # there is nothing to follow
        return None
    m = watch.plan.recipe.contrast.key_momentum
    return Finding(
        f"a step moves {watch.mean('key_moved_share', watch.looks):.1%} of the key encoder's values, while it is "
        f"{watch.looks[-1]['parameter_distance']:.2%} of their norm away from the query encoder's",
        "The key encoder does not follow: keys stay those of an old network, here of the untrained one",
        f"Start a new run with contrast.key_momentum below {m:g}; 0.999 is the published value" if m > 0.9999 else
        "contrast.key_momentum is fine: its updates are lost by rounding; keep the parameters in float32",
    )  # fmt: skip


def _stale_dictionary(watch: Watch) -> Finding | None:
    if len(watch.full) < LOOKS or watch.mean("parameter_distance", watch.full) > FOLLOWS_CLOSELY:
        return None
    if watch.plan.recipe.contrast.queue_keys < watch.plan.recipe.batch.global_batch_size:
        return None  # among so few keys a query is told apart more easily than among its step's, however old they are
    queue, fresh = watch.mean("queue_top1", watch.full), watch.mean("fresh_top1", watch.full)
    if queue - fresh < STALE_GAP or queue < STALE_RATIO * fresh:
        return None
    m, turn = watch.plan.recipe.contrast.key_momentum, watch.plan.facts()["queue_turn_steps"]
    return Finding(
        f"a query finds its mate among {watch.plan.recipe.contrast.queue_keys} queued keys {queue:.0%} of the time, and among the few keys of its own step {fresh:.0%}",
        "Queued keys are told by their age, not by their image: the loss looks good while the features stay poor",
        f"Start a new run with contrast.key_momentum above {m:g} (0.999, or 0.99 for small data), a smaller contrast.queue_keys "
        f"(a key is {turn:.0f} steps old when it leaves) or a lower rate",
    )


def _collapse(watch: Watch) -> Finding | None:
    if not _collapsed(watch):
        return None
    seen = f"all keys of a step are nearly one: spread {watch.mean('key_spread', watch.full):.3f} of 1, and a query is no nearer to its own key than to others"
    if _shrunk(watch):
        shrunk = watch.looks[-1]["weight_norm"] / watch.first_weight_norm
        return Finding(f"{seen}; the weights' norm fell to {shrunk:.0%}", "The encoder's weights decay faster than they learn", "Start a new run with a lower optimizer.weight_decay (1e-4 is the published one, of sgd)")
    return Finding(seen, "The encoder gives one answer for every image", "Start a new run with a lower rate; look at the two views in TensorBoard, and at augment.*")


def _batchnorm_leak(watch: Watch) -> Finding | None:
    cure = "Start a new run with batch.bn_group_size an eighth of the batch or less, and keys shuffled over all groups (batch.shuffle_domain_groups 0)"
    means = "A query recognises the batch statistics of its group instead of its image: the pretext gets easy, the features poor"
    if watch.plan.groups == 1:
        return Finding("the whole batch is one BatchNorm group", means, cure) if watch.looks else None
    looks = [entry for entry in watch.full if "mate_z" in entry]
    if len(looks) < LOOKS or abs(z := fmean(entry["mate_z"] for entry in looks)) < LEAK:
        return None
    return Finding(f"a query is {abs(z):.2f} standard deviations {'nearer to' if z > 0 else 'farther from'} the keys of its own BatchNorm group than others of its step", means, cure)


def _false_negatives(watch: Watch) -> Finding | None:
    looks = [entry for entry in watch.looks if "own_image_keys" in entry]
    if len(looks) < LOOKS or (count := fmean(entry["own_image_keys"] for entry in looks)) < OWN_KEYS:
        return None
    mass = fmean(entry["own_image_mass"] for entry in looks)
    return Finding(
        f"a query meets {count:.1f} older keys of its own image in the queue ({mass:.1%} of the softmax's weight)",
        "It is taught to push itself away: the queue is large beside the data set",
        f"Start a new run with contrast.queue_keys below a tenth of the {watch.plan.rows} images",
    )


def _duplicates(watch: Watch) -> Finding | None:
    share = watch.records[-1].get("duplicate_share", 0.0)
    if share < COPIES or watch.step * watch.plan.recipe.batch.global_batch_size < min(watch.plan.rows, 1000):
        return None
    return Finding(
        f"{share:.1%} of the images seen so far are copies of another, byte for byte",
        "A copy's key is a negative of its own image, and such images count double",
        "`moco-ray pack --drop-duplicates` makes a data set without them",
    )


def _loss_at_chance(watch: Watch) -> Finding | None:
    turns = watch.step / watch.plan.facts()["queue_turn_steps"] - 1  # since it was full
    if len(watch.records) < LOOKS or watch.fill < 1 or turns < CHANCE_TURNS:
        return None
    if watch.step < watch.plan.recipe.schedule.warmup_steps + CHANCE_STEPS:
        return None
    loss, chance = watch.mean("loss", watch.records), watch.plan.chance_loss
    if loss < CHANCE * chance:
        return None
    return Finding(
        f"after {turns:.0f} turns of the queue the loss is {loss:.2f}, and log(K+1) is {chance:.2f}",
        "The network knows next to nothing of the task yet",
        "Check optimizer.learning_rate (too low?), contrast.temperature (0.07 to 0.2 are usual), and whether the two views in TensorBoard show one thing",
    )


def _input_bound(watch: Watch) -> Finding | None:
    waits = [entry["input_wait_share"] for entry in watch.records if "input_wait_share" in entry]
    if len(waits) < LOOKS or (share := median(waits)) < WAITING:
        return None
    return Finding(
        f"workers wait for images {share:.0%} of the time",
        "Reading and decoding cannot keep up with the encoders",
        "Give Ray more CPUs, `moco-ray pack --short-side` the images, or start fewer workers; `moco-ray bench-input` tells what this machine can do",
    )


def _queue_not_filled(watch: Watch) -> Finding | None:
    if watch.fill >= 1 or watch.step < FILLING * watch.plan.total_steps:
        return None
    return Finding(
        f"the queue is {watch.fill:.0%} full at step {watch.step} of {watch.plan.total_steps}",
        "Random vectors are among the negatives: loss and accuracy mean nothing yet, and will for little of this run",
        "Start a new run with a smaller contrast.queue_keys or a longer schedule",
    )


CONDITIONS: dict[str, Callable[[Watch], Finding | None]] = {  # causes before what they cause
    "queues_differ": _queues_differ,
    "learning_rate_too_high": _learning_rate_too_high,
    "key_encoder_frozen": _key_encoder_frozen,
    "stale_dictionary": _stale_dictionary,
    "collapse": _collapse,
    "batchnorm_leak": _batchnorm_leak,
    "false_negatives": _false_negatives,
    "duplicates": _duplicates,
    "loss_at_chance": _loss_at_chance,
    "input_bound": _input_bound,
    "queue_not_filled": _queue_not_filled,
}
