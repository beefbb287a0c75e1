"""The Grafana dashboard of a run, as JSON: `python -m moco_ray.grafana > infra/monitoring/moco_ray_dashboard.json`.

Responsible for its panels and their queries over gauges.py's metrics. Not responsible for a Grafana or a Prometheus.
"""

import json
from typing import Any, NamedTuple

from moco_ray.gauges import METRICS, TOTAL_STEPS

RAY = "ray_"  # what Ray puts before the name of each metric when it exports it


class Panel(NamedTuple):
    title: str
    scalars: tuple[str, ...]  # of metrics.jsonl
    unit: str = "short"  # Grafana's


ROWS = {
    "Learning": (
        Panel("Loss, beside chance", ("loss", "chance_loss")),
        Panel("kNN of the backbone", ("knn_top1",), "percentunit"),
        Panel("Contrast top-1 and top-5", ("top1", "top5"), "percentunit"),
        Panel("Learning rate", ("learning_rate",)),
        Panel("Norms of gradient and weights", ("gradient_norm", "weight_norm")),
    ),
    "Dictionary": (
        Panel("Top-1 among queued keys, beside fresh ones", ("queue_top1", "fresh_top1"), "percentunit"),
        Panel("Similarities", ("positive_similarity", "negative_similarity", "step_similarity")),
        Panel("Queue filled", ("queue_fill",), "percentunit"),
        Panel("Age of keys, steps", ("oldest_key_age_steps", "mean_key_age_steps")),
        Panel("Drift of a key in its life in the queue, cosine", ("drift",)),
        Panel("Effective rank of the step's keys", ("effective_rank",)),
        Panel("Spread of the step's keys", ("key_spread",)),
        Panel("Own BatchNorm group's keys, standard deviations", ("mate_z",)),
        Panel("Softmax mass on the own image's older keys", ("own_image_mass",), "percentunit"),
    ),
    "Input": (
        Panel("Images a second", ("images_per_second",)),
        Panel("Waiting for images", ("input_wait_share",), "percentunit"),
        Panel("Unreadable images of the epoch", ("bad_rows",)),
        Panel("Duplicates", ("duplicate_share",), "percentunit"),
    ),
    "System and events": (
        Panel("Verdicts raised (0: healthy)", ("verdicts",)),
        Panel("Workers", ("workers",)),
        Panel("Restarts, steps computed again", ("restarts", "steps_recomputed")),
        Panel("Time lost", ("seconds_lost",), "s"),
        Panel("Peak memory of worker 0", ("peak_memory_bytes",), "bytes"),
    ),
}
WIDTH, HEIGHT, COLUMNS = 8, 8, 3  # of Grafana's 24 columns
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Panels by category, for the runs that are chosen above them."""
    panels, y = [_progress()], HEIGHT // 2
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        for number, panel in enumerate(row):
            place = {"x": number % COLUMNS * WIDTH, "y": y + 1 + number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_timeseries(panel, place))
        y += 1 + -(-len(row) // COLUMNS) * HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "title": "moco_ray", "uid": "moco-ray", "schemaVersion": 39, "version": 1, "editable": True, "tags": ["ray", "moco"],
        "time": {"from": "now-6h", "to": "now"}, "refresh": "30s", "templating": {"list": _choices()}, "panels": panels,
    }  # fmt: skip


def expression(metric: str) -> str:
    """PromQL of one metric of the chosen runs; `max` joins what a driver and the one after it export."""
    return f'max by (run) ({RAY}{metric}{{run=~"$run"}})'


def _progress() -> dict[str, Any]:
    done = f"{expression(METRICS['step'][0])} / {expression(TOTAL_STEPS[0])}"
    return {
        "type": "bargauge", "title": "Done", "datasource": DATASOURCE, "gridPos": {"x": 0, "y": 0, "w": 24, "h": HEIGHT // 2},
        "fieldConfig": {"defaults": {"unit": "percentunit", "min": 0, "max": 1}, "overrides": []},
        "options": {"orientation": "horizontal", "displayMode": "basic", "reduceOptions": {"calcs": ["lastNotNull"]}},
        "targets": [{"refId": "A", "expr": done, "legendFormat": "{{run}}", "datasource": DATASOURCE}],
    }  # fmt: skip


def _timeseries(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + number), "expr": expression(METRICS[name][0]), "legendFormat": f"{name.replace('_', ' ')} {{{{run}}}}",
         "datasource": DATASOURCE}
        for number, name in enumerate(panel.scalars)
    ]  # fmt: skip
    said = "; ".join(f"{name.replace('_', ' ')}: {METRICS[name][1]}" for name in panel.scalars)
    return {
        "type": "timeseries", "title": panel.title, "description": said, "datasource": DATASOURCE, "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"lineWidth": 2, "fillOpacity": 0}}, "overrides": []},
        "targets": targets,
    }  # fmt: skip


def _choices() -> list[dict[str, Any]]:
    query = f"label_values({RAY}{METRICS['loss'][0]}, run)"
    run = {"name": "run", "type": "query", "label": "Run", "datasource": DATASOURCE, "query": query, "refresh": 2,
           "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}  # fmt: skip
    return [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}, run]


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
