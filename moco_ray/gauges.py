"""The scalars of a run as Ray metrics, for the places where people watch clusters: Prometheus, Grafana, Ray's dashboard.

Responsible for their names, by Prometheus' convention with units, and for setting them in the driver. Ray exports them on each node's
metrics port, under names that begin with "ray_", where its extra is installed (`pip install 'ray[default]'`); without it nothing is
exported and nothing else changes. Not responsible for what they mean, nor for the dashboard (grafana.py).
"""

from typing import Any

from ray.util.metrics import Gauge

from moco_ray.plan import Plan

METRICS = {  # scalar of metrics.jsonl -> name, what it is; a share is a ratio in 0..1
    "step": ("moco_ray_completed_steps", "Steps that are done"),
    "epoch": ("moco_ray_completed_epochs", "Epochs that are done"),
    "loss": ("moco_ray_loss", "InfoNCE loss, mean since the last record"),
    "chance_loss": ("moco_ray_chance_loss", "log(K+1): the loss of a network that knows nothing"),
    "top1": ("moco_ray_contrast_top1_ratio", "Queries whose own key is nearer than all queued keys"),
    "top5": ("moco_ray_contrast_top5_ratio", "Queries whose own key is among the five nearest"),
    "learning_rate": ("moco_ray_learning_rate", "Learning rate of the optimizer"),
    "gradient_norm": ("moco_ray_gradient_norm", "Norm of the gradient"),
    "weight_norm": ("moco_ray_weight_norm", "Norm of the query encoder's parameters"),
    "knn_top1": ("moco_ray_knn_top1_ratio", "kNN accuracy of the backbone's features"),
    "queue_fill": ("moco_ray_queue_fill_ratio", "Share of the queue that holds keys"),
    "queue_top1": ("moco_ray_queue_top1_ratio", "Top-1 of some queries among queued keys"),
    "fresh_top1": ("moco_ray_fresh_top1_ratio", "Top-1 of the same queries among the step's own keys"),
    "positive_similarity": ("moco_ray_positive_similarity", "Cosine of a query and its own key"),
    "negative_similarity": ("moco_ray_negative_similarity", "Mean cosine of a query and queued keys"),
    "step_similarity": ("moco_ray_step_similarity", "Mean cosine of a query and the step's other keys"),
    "oldest_key_age_steps": ("moco_ray_oldest_key_age_steps", "Age of the oldest queued key"),
    "mean_key_age_steps": ("moco_ray_key_age_steps", "Mean age of queued keys"),
    "mean_key_age_epochs": ("moco_ray_key_age_epochs", "Mean age of queued keys"),
    "drift": ("moco_ray_key_drift_cosine", "Cosine of a key and itself encoded anew as it leaves the queue"),
    "effective_rank": ("moco_ray_effective_rank", "Effective rank of the step's keys"),
    "key_spread": ("moco_ray_key_spread", "Spread of the step's keys: 1 even, 0 collapsed"),
    "uniformity": ("moco_ray_uniformity", "Uniformity of the step's keys"),
    "mate_z": ("moco_ray_mate_z", "Similarity to keys of the own BatchNorm group, standard deviations"),
    "parameter_distance": ("moco_ray_parameter_distance_ratio", "Distance of the two encoders by the query encoder's norm"),
    "own_image_mass": ("moco_ray_own_image_mass_ratio", "Softmax mass of negatives on older keys of the own image"),
    "queues_equal": ("moco_ray_queues_equal", "1 if the queue is the same on all ranks"),
    "images_per_second": ("moco_ray_images_per_second", "Images that are trained on in a second"),
    "input_wait_share": ("moco_ray_input_wait_ratio", "Share of their time that workers wait for images"),
    "bad_rows": ("moco_ray_bad_rows", "Unreadable images of the epoch"),
    "duplicate_share": ("moco_ray_duplicate_ratio", "Share of a sample of the images that occur twice"),
    "peak_memory_bytes": ("moco_ray_peak_memory_bytes", "Peak memory of worker 0"),
    "workers": ("moco_ray_workers", "Workers of the run"),
    "restarts": ("moco_ray_restarts", "Restarts of the workers so far"),
    "steps_recomputed": ("moco_ray_recomputed_steps", "Steps that were computed again"),
    "seconds_lost": ("moco_ray_lost_seconds", "Time without a new step, by restarts"),
    "verdicts": ("moco_ray_verdicts", "Verdicts that were raised so far; 0 is healthy"),
}
TOTAL_STEPS = ("moco_ray_total_steps", "Steps that the run is to take")


class Gauges:
    """Those of one driver's run, tagged with its name. A scalar that never comes is never exported."""

    def __init__(self, run: str, plan: Plan):
        self._tags, self._gauges = {"run": run}, {}
        self._values = {TOTAL_STEPS: float(plan.total_steps)}

    def show(self, entry: dict[str, Any]) -> None:
        """An entry of metrics.jsonl, or counters of an event."""
        for name in METRICS.keys() & entry.keys():
            if "knn_top1" in entry and name in ("step", "epoch"):  # of an evaluation, which may lie behind
                continue
            self._values[METRICS[name]] = entry[name]
        for (name, meaning), value in self._values.items():  # all of them: what was set before the node's agent was up is lost
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, meaning, tag_keys=tuple(self._tags))
            self._gauges[name].set(value, self._tags)
