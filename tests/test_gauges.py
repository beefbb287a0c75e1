"""Ray metrics and the Grafana dashboard over them, without Ray."""

import json
import re
from pathlib import Path

import pytest

from moco_ray import gauges
from moco_ray.gauges import METRICS, TOTAL_STEPS, Gauges
from moco_ray.grafana import ROWS, dashboard
from moco_ray.tensorboard_page import TAGS
from tests import synthetic

FILE = Path(__file__).parent.parent / "infra" / "monitoring" / "moco_ray_dashboard.json"


class Recorded:
    """In place of Ray's Gauge."""

    values: dict[tuple[str, str], float] = {}

    def __init__(self, name, description="", tag_keys=()):
        assert tag_keys == ("run",) and description
        self._name = name

    def set(self, value, tags):
        self.values[self._name, tags["run"]] = value


def test_names_follow_prometheus_convention_and_each_is_there_once():
    names = [name for name, _ in [*METRICS.values(), TOTAL_STEPS]]
    assert len(set(names)) == len(names)
    for scalar, (name, _) in METRICS.items():
        assert re.fullmatch(r"moco_ray_[a-z0-9]+(_[a-z0-9]+)*", name)
        for unit in ("bytes", "seconds", "steps", "epochs"):
            if unit in scalar.split("_")[-1:]:
                assert name.endswith(f"_{unit}"), "a name ends with its unit"
        if scalar.endswith("_share") or "top" in scalar or scalar.endswith("_fill"):
            assert name.endswith("_ratio")
    assert set(METRICS) <= {*TAGS, "step", "epoch", "chance_loss"}


def test_a_record_sets_what_it_holds_and_an_evaluation_turns_no_step_back(monkeypatch):
    monkeypatch.setattr(gauges, "Gauge", Recorded)
    Recorded.values = {}
    own = Gauges("first", synthetic.plan(synthetic.recipe()))
    own.show({"step": 7, "epoch": 0.8, "loss": 3.5, "input_wait_share": 0.25, "wall_time": 1.0})
    Recorded.values.clear()  # as an agent that was not up yet
    own.show({"step": 5, "epoch": 0.6, "knn_top1": 0.75})
    assert Recorded.values == {
        ("moco_ray_total_steps", "first"): 20, ("moco_ray_completed_steps", "first"): 7, ("moco_ray_completed_epochs", "first"): 0.8,
        ("moco_ray_loss", "first"): 3.5, ("moco_ray_input_wait_ratio", "first"): 0.25, ("moco_ray_knn_top1_ratio", "first"): 0.75,
    }  # fmt: skip


def expressions(board: dict) -> list[str]:
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    return queries + [choice["query"] for choice in board["templating"]["list"] if choice["type"] == "query"]


def test_every_expression_of_the_dashboard_names_metrics_that_are_exported():
    known = {f"ray_{name}" for name, _ in [*METRICS.values(), TOTAL_STEPS]}
    for query in expressions(json.loads(FILE.read_text())):
        named = set(re.findall(r"\bray_\w+", query))
        assert named and named <= known, query


def test_the_dashboard_that_lies_in_infra_is_the_one_that_is_made_here():
    """`python -m moco_ray.grafana > infra/monitoring/moco_ray_dashboard.json` after a change."""
    assert json.loads(FILE.read_text()) == dashboard()


def test_panels_do_not_overlap_and_each_has_a_title():
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert panel["title"] and not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


@pytest.mark.parametrize("scalar", ["loss", "knn_top1", "queue_top1", "input_wait_share", "verdicts"])
def test_what_tells_whether_a_run_is_healthy_has_a_panel(scalar):
    assert scalar in {name for row in ROWS.values() for panel in row for name in panel.scalars}
