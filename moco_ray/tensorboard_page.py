"""What TensorBoard shows of a run, and where: the tag of each scalar, the charts that belong together, the texts.

Responsible for names, for the layout of the page "Custom Scalars", for what "HParams" compares runs by and for the words of texts.
Not responsible for writing them (monitor.py), for pictures (pictures.py), nor for what a number means (dictionary.py, verdicts.py).
"""

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import custom_scalars, hparams

from moco_ray.plan import Plan
from moco_ray.verdicts import COPIES, LEAK, OWN_KEYS, RAN_AWAY, STANDS_STILL, WAITING

TAGS = {  # the tag in TensorBoard of each scalar of metrics.jsonl; what stands before "/" is its group there
    "loss": "learning/loss",
    "top1": "learning/contrast_top1",
    "top5": "learning/contrast_top5",
    "learning_rate": "learning/learning_rate",
    "gradient_norm": "learning/gradient_norm",
    "weight_norm": "learning/weight_norm",
    "knn_top1": "evaluation/knn_top1_backbone_features",
    "knn_left_out": "evaluation/images_left_out",
    "evaluation_seconds": "evaluation/seconds",
    "queue_fill": "dictionary/queue_fill",
    "positive_similarity": "dictionary/positive_similarity",
    "negative_similarity": "dictionary/negative_similarity",
    "step_positive_similarity": "dictionary/step_positive_similarity",
    "step_similarity": "dictionary/step_similarity",
    "queue_top1": "dictionary/queue_top1",
    "fresh_top1": "dictionary/fresh_top1",
    "top1_gap": "dictionary/top1_gap",
    "mass_newest": "dictionary/mass_newest_quarter",
    "mass_newer": "dictionary/mass_newer_quarter",
    "mass_older": "dictionary/mass_older_quarter",
    "mass_oldest": "dictionary/mass_oldest_quarter",
    "oldest_key_age_steps": "dictionary/oldest_key_age_steps",
    "mean_key_age_steps": "dictionary/mean_key_age_steps",
    "oldest_key_age_epochs": "dictionary/oldest_key_age_epochs",
    "mean_key_age_epochs": "dictionary/mean_key_age_epochs",
    "drift": "dictionary/drift_cosine",
    "effective_rank": "dictionary/effective_rank",
    "key_spread": "dictionary/key_spread",
    "uniformity": "dictionary/uniformity",
    "mate_z": "dictionary/mate_z",
    "own_image_mass": "dictionary/own_image_mass",
    "own_image_keys": "dictionary/own_image_keys",
    "queues_equal": "dictionary/queues_equal",
    "parameter_distance": "dictionary/parameter_distance",
    "key_moved_share": "dictionary/key_moved_share",
    "images_per_second": "input/images_per_second",
    "input_wait_share": "input/wait_share",
    "bad_rows": "input/bad_rows",
    "duplicate_share": "input/duplicate_share",
    "peak_memory_bytes": "system/peak_memory_bytes",
    "workers": "system/workers",
    "restarts": "system/restarts",
    "steps_recomputed": "system/steps_recomputed",
    "seconds_lost": "system/seconds_lost",
    "verdicts": "events/verdicts",
}
LAYOUT = {  # the page "Custom Scalars": category -> chart -> scalars in it; TensorBoard colours by run, so the line to compare with
    # is in a run of its own, `reference`, under the tag of the first
    "Learning": {
        "verdicts raised (0: healthy; their words: page Text)": ["verdicts"],
        "loss (reference: chance, log(K+1))": ["loss"],
        "kNN of the backbone: the judge (reference: of the untrained network)": ["knn_top1"],
        "(K+1)-way top-1 (reference: top-5)": ["top1"],
        "learning rate": ["learning_rate"],
        "norm of the gradient": ["gradient_norm"],
    },
    "Dictionary": {
        "top-1 among queued keys (reference: among fresh ones; far above it: stale)": ["queue_top1"],
        "similarity of a query and its key (reference: queued keys; together near 1: collapse)": ["positive_similarity"],
        "softmax mass by age of key (reference: a quarter)": ["mass_newest", "mass_newer", "mass_older", "mass_oldest"],
        "queue filled (below 1 nothing else here counts)": ["queue_fill"],
        "age of the oldest key, epochs (reference: mean)": ["oldest_key_age_epochs"],
        "age of the oldest key, steps (reference: mean)": ["oldest_key_age_steps"],
        "drift: cosine of a key and itself encoded anew as it leaves": ["drift"],
        "effective rank of the step's keys (reference: their dimensions; near 1: collapse)": ["effective_rank"],
        "spread of the step's keys (reference: even; near 0: collapse)": ["key_spread"],
        "uniformity of the step's keys (lower: more even)": ["uniformity"],
        "similarity of a query and the step's other keys": ["step_similarity"],
        "own BatchNorm group's keys, deviations (beyond the reference: leak)": ["mate_z"],
        "softmax mass on older keys of the query's own image": ["own_image_mass"],
        "older keys of the query's own image in the queue (above the reference: K is large)": ["own_image_keys"],
        "distance of the encoders (above the reference: the weights run away)": ["parameter_distance"],
        "norm of the weights": ["weight_norm"],
        "share of the key encoder that a step moves (below the reference: frozen)": ["key_moved_share"],
        "queues equal on all ranks (1: yes)": ["queues_equal"],
    },
    "Input": {
        "images a second": ["images_per_second"],
        "share of time waiting for images (above the reference: give it CPUs)": ["input_wait_share"],
        "unreadable images of the epoch": ["bad_rows"],
        "share of duplicates among the images (above the reference: many)": ["duplicate_share"],
    },
    "System": {
        "workers": ["workers"],
        "peak memory of worker 0, bytes": ["peak_memory_bytes"],
        "seconds of an evaluation": ["evaluation_seconds"],
    },
    "Events": {
        "restarts": ["restarts"],
        "steps computed again": ["steps_recomputed"],
        "seconds lost": ["seconds_lost"],
    },
}
COMPARED = ("loss", "knn_top1", "queue_top1", "fresh_top1", "effective_rank", "images_per_second", "verdicts")  # in HParams
BESIDE = {  # scalar -> the scalar, or the number, that is its reference; bounds are those of the verdicts
    "loss": "chance_loss",
    "knn_top1": "knn_untrained",
    "top1": "top5",
    "queue_top1": "fresh_top1",
    "positive_similarity": "negative_similarity",
    "mass_newest": 0.25,
    "oldest_key_age_epochs": "mean_key_age_epochs",
    "oldest_key_age_steps": "mean_key_age_steps",
    "key_spread": 1.0,
    "mate_z": LEAK,
    "own_image_keys": OWN_KEYS,
    "parameter_distance": RAN_AWAY,
    "key_moved_share": STANDS_STILL,
    "input_wait_share": WAITING,
    "duplicate_share": COPIES,
}
HEALTHY = "No verdict was raised so far. What is watched for: stale dictionary, collapse, batch norm that leaks, loss at chance, \
false negatives, duplicates, learning rate too high, frozen key encoder, queues that differ, waiting for images."


def summaries(plan: Plan) -> list[Summary]:
    """The layout, and what compares runs: both of this run itself, so that no further run appears beside it."""
    layout = {
        category: {title: ["Multiline", [f"^{re.escape(TAGS[name])}$" for name in names]] for title, names in charts.items()}
        for category, charts in LAYOUT.items()
    }
    metrics = {TAGS[name]: 0.0 for name in COMPARED}
    return [custom_scalars(layout), *hparams(hyperparameters(plan), metrics)]


def references(entry: dict[str, Any], plan: Plan) -> dict[str, float]:
    """tag -> what the scalar of `entry` that has this tag is to be compared with."""
    known = {name: entry.get(other) if isinstance(other, str) else other for name, other in BESIDE.items()}
    known["effective_rank"] = plan.recipe.encoder.feature_dim
    return {TAGS[name]: value for name, value in known.items() if name in entry and value is not None}


def hyperparameters(plan: Plan) -> dict[str, float | str | bool]:
    """`section.key` of each value of the recipe that decides what is computed, and what follows from it; lists as text."""
    values = plan.recipe.model_dump(mode="json")
    chosen = {
        f"{section}.{key}": value if isinstance(value, int | float | str) else ", ".join(map(str, value))
        for section in ("encoder", "contrast", "batch", "optimizer", "schedule", "augment")
        for key, value in values[section].items()
    }
    return {**chosen, "run.seed": values["run"]["seed"], "rows": plan.rows, "total_steps": plan.total_steps}


def recipe_text(plan: Plan) -> str:
    """The resolved recipe and what follows from it, in Markdown."""
    facts = _rows(("derived", "value"), [(name.replace("_", " "), value) for name, value in plan.facts().items()])
    said = "".join(f"\n- {line}" for line in plan.warnings())
    return f"```\n{plan.recipe.toml()}\n```\n\n{facts}" + (f"\n\nTo know before the run:\n{said}" if said else "")


def environment_text(code: dict[str, Any], nodes: Sequence[str], hardware: Sequence[str]) -> str:
    """Versions, the code's commit, and the machine of each worker in order, in Markdown."""
    commit = code["git_commit"] or "outside a git checkout"
    lines = [("git commit", commit + (", with changes" if code["git_dirty"] else "")), ("python", code["python"])]
    lines += list(code["versions"].items())
    where = [(f"worker {rank}", f"{node}: {what}") for rank, (node, what) in enumerate(zip(nodes, hardware, strict=True))]
    return _rows(("what", "value"), [*lines, *where])


def events_text(story: Iterable[dict[str, Any]]) -> str:
    """Events as a table in Markdown, the newest first."""
    return _rows(
        ("when (UTC)", "step", "what happened"), [(_when(event), event["step"], event["text"]) for event in reversed(list(story))]
    )


def verdicts_text(raised: Sequence[dict[str, Any]]) -> str:
    """The verdicts among the events as a table in Markdown, the newest first, or what it means that there is none."""
    if not raised:
        return HEALTHY
    return _rows(("step", "verdict", "seen", "what it means", "what to change"), [
        (event["step"], event["name"].replace("_", " "), event["seen"], event["means"], event["change"]) for event in reversed(raised)
    ])  # fmt: skip


def picture(tag: str, jpeg: bytes, height: int, width: int) -> Summary:
    """An image that is encoded already: a tenth of what torch's own, a PNG, takes of object storage."""
    held = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=jpeg)
    return Summary(value=[Summary.Value(tag=tag, image=held)])


def _when(event: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.get("wall_time")))


def _rows(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines)
