"""Prometheus rules: each expression parses, and names only what moco_ray and Ray export. No Prometheus."""

import re
from pathlib import Path

import promql_parser
import pytest
import ray
import yaml

from moco_ray.gauges import METRICS, TOTAL_STEPS
from moco_ray.grafana import RAY, dashboard
from moco_ray.verdicts import WAITING
from tests.test_gauges import expressions

FILE = Path(__file__).parent.parent / "infra" / "monitoring" / "rules.yml"
RULES = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]


def exported() -> set[str]:
    """Of ours, and of those that Ray's own dashboards ask for."""
    panels = (Path(ray.__file__).parent / "dashboard" / "modules" / "metrics" / "dashboards").glob("*.py")
    rays = set(re.findall(r"\b(?:ray|autoscaler)_[a-z_]+", "".join(p.read_text() for p in panels)))
    assert len(rays) > 50
    return {RAY + name for name, _ in [*METRICS.values(), TOTAL_STEPS]} | rays


def named(expression: str) -> set[str]:
    """Metrics of a PromQL expression. Raises ValueError where it does not parse."""
    names = set()

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            names.add(node.name)
        return True

    assert promql_parser.walk(promql_parser.parse(expression), visit)
    return names


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_parses_and_asks_for_what_is_exported(rule):
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"} and set(rule["annotations"]) == {"summary", "description"}
    assert rule["labels"]["severity"] in ("warning", "critical") and re.fullmatch(r"\d+m", rule.get("for", "1m"))
    found = named(rule["expr"])
    assert found and found <= exported()
    kept = set(re.findall(r"(?:by|on) \((\w+)\)", rule["expr"]))
    for text in rule["annotations"].values():
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept, "a label that the expression does not keep"


def test_the_bound_of_waiting_is_that_of_the_verdict():
    rule, = (rule for rule in RULES if rule["alert"] == "MocoRayInputBound")
    assert rule["expr"].endswith(f"> {WAITING}")


def test_the_dashboards_expressions_parse_too():
    for expression in expressions(dashboard()):
        if not expression.startswith("label_values"):
            assert named(expression) <= exported()


def test_a_mistake_in_a_rule_is_seen():
    assert named("max by (run) (ray_moco_ray_los) > 1") - exported() == {"ray_moco_ray_los"}
    with pytest.raises(ValueError):
        named("max by (run) (ray_moco_ray_loss")


def test_file_has_the_keys_that_prometheus_knows_and_names_once():
    groups = yaml.safe_load(FILE.read_text())
    assert set(groups) == {"groups"} and all(set(g) == {"name", "rules"} for g in groups["groups"])
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
