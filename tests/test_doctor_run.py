"""`moco-ray doctor RUN` on run folders made by hand: the report, its exit code, and the page of curves with its marks."""

import io
import json
import math

import pytest
from matplotlib.axes import Axes
from PIL import Image

from moco_ray import doctor_run
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.evaluate import health_page
from moco_ray.evaluate.curves import SHADE
from moco_ray.evaluate.health_page import PANELS, Happening, curves_of, draw_health
from moco_ray.verdicts import Verdict
from tests.object_stores import filled, use
from tests.run_folders import entry, evaluation, event, health, lease, make_run, verdict, write_lines

STALE = Verdict("stale_dictionary", 8, "queue top-1 is 8.7 times fresh top-1", "old keys are told by their age", "raise contrast.key_momentum")
ALL = {metric.name for panel in PANELS for metric in panel.metrics} - {"knn_top1"}


@pytest.fixture
def storage(tmp_path) -> Store:
    return Store(str(tmp_path / "runs"))


@pytest.fixture
def raised(monkeypatch):
    """What the verdicts come to, and what they were given."""
    held = {"verdicts": [], "entries": None, "plan": None}

    def judge(entries, plan):
        held["entries"], held["plan"] = entries, plan
        return list(held["verdicts"])

    monkeypatch.setattr(doctor_run, "judge", judge)
    return held


def complete(step: int, **values) -> dict:
    """A line with every metric that the page knows; the queue is full from step 4 on."""
    return entry(step) | {name: 0.1 + step / 1000 for name in ALL - entry(1).keys()} | values


# The report


def test_a_healthy_run_is_told_of_and_leaves_with_0(storage, raised, capsys):
    run = make_run(storage, "one", steps=20)
    write_lines(run, "metrics.jsonl", [entry(step) for step in range(1, 21)] + [evaluation(10, 0.7), evaluation(20, 0.6)])
    write_lines(run, "events.jsonl", [event("started", 0), event("saved", 20), event("evaluated", 20)])
    lease(run, released=True)
    assert doctor_run.report(run.uri, False) == 0
    text = capsys.readouterr().out
    for words in (
        "state       finished", "step 20 of 20, epoch 2.22", "0:20 since", "110 images/s by 2 workers, 1% of the time waiting",
        f"{math.log(101) - 2:.3f} (chance {math.log(101):.3f})", "best 70.0% at step 10, last 60.0% at step 20", "safe        step 20",
        "resnet10 on 300 images, batch 32 in 8 groups, K 100, m 0.99", "Nothing was raised.", "Nothing happened to it", f"curves: {run.uri}/health.png",
    ):  # fmt: skip
        assert words in text, f"{words!r} is not in\n{text}"
    assert raised["plan"].total_steps == 20 and raised["plan"].recipe.contrast.queue_keys == 100
    assert [e["step"] for e in raised["entries"]] == [*range(1, 21), 10, 20], "the verdicts see the whole record as it was written"


def test_what_was_raised_is_told_with_its_step_grounds_meaning_and_cure_and_leaves_with_1(storage, raised, capsys):
    run = make_run(storage, "one")
    raised["verdicts"] = [STALE]
    health(run, 12, verdict(step=9), verdict("input_bound", step=3))  # the first by this release's judgement; the second by the driver's alone
    assert doctor_run.report(run.uri, False) == 1
    text = capsys.readouterr().out
    assert "Raised: 2 verdicts" in text and text.index("input bound, at step 3") < text.index("stale dictionary, at step 8")
    assert f"    seen    {STALE.seen}\n    means   {STALE.means}\n    change  {STALE.change}\n" in text


def test_the_verdicts_are_those_of_the_record_at_their_steps(storage, capsys):
    run = make_run(storage, "one")
    assert doctor_run.report(run.uri, False) == 0
    write_lines(run, "metrics.jsonl", [entry(step, input_wait_share=0.5 if step > 4 else 0.01) for step in range(1, 13)])
    assert doctor_run.report(run.uri, False) == 1
    text = capsys.readouterr().out
    assert "Raised: 1 verdict\n  input bound, at step 7\n" in text and "workers wait for images 50% of the time" in text  # three of the last five


def test_events_that_mattered_are_counted_and_told_and_no_others(storage, raised, capsys):
    run = make_run(storage, "one")
    story = [
        event("started", 0, restarts=0, steps_recomputed=0, seconds_lost=0.0), event("saved", 4), event("node_lost", 6, "lost node b at step 6"),
        event("continuing", 4, "continuing with 1 worker", restarts=1, steps_recomputed=2, seconds_lost=0.0),
        event("caught_up", 6, restarts=1, steps_recomputed=2, seconds_lost=31.4), event("not_saved", 8, "disk full"), event("not_saved", 9, "disk full"),
    ]  # fmt: skip
    write_lines(run, "events.jsonl", story)
    assert doctor_run.report(run.uri, False) == 0
    text = capsys.readouterr().out
    assert "Happened: 1 restart, 1 lost node, 2 checkpoints that could not be saved; 2 steps computed again, 31 s lost" in text
    assert "step 6: lost node b at step 6" in text and text.count("disk full") == 2 and "saved\n" not in text


def test_bad_images_are_counted_over_epochs_and_lines_that_cannot_be_read_are_told(storage, raised, capsys):
    run = make_run(storage, "one")  # 9 steps an epoch, in which each line counts those so far
    lines = [json.dumps(entry(step, bad_rows=step if step <= 9 else 1)) for step in range(1, 12)]
    run.write("metrics.jsonl", ("\n".join([*lines[:5], '{"torn', *lines[5:]]) + '\n{"step": 12, "lo').encode())
    doctor_run.report(run.uri, True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["bad_rows"] == 9 + 1 and facts["unreadable_lines"] == 1 and facts["step"] == 11


def test_the_report_as_json_holds_what_the_text_says_and_no_nan(storage, raised, capsys):
    run = make_run(storage, "one")
    write_lines(run, "metrics.jsonl", [entry(1), entry(2, loss=math.nan), evaluation(2, 0.5)])
    write_lines(run, "events.jsonl", [event("continuing", 1, restarts=1)])
    raised["verdicts"] = [STALE]
    assert doctor_run.report(run.uri, True) == 1
    text = capsys.readouterr().out
    facts = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert facts["loss"] is None and facts["verdicts"] == [STALE._asdict()] and facts["restarts"] == 1
    assert facts["knn_best"] == {"step": 2, "knn_top1": 0.5} and facts["picture"] == f"{run.uri}/health.png" and facts["events"][0]["kind"] == "continuing"


def test_mistakes_are_named(storage, raised):
    with pytest.raises(UserError, match="is no run folder"):
        doctor_run.report(storage.place("none"), False)
    run = make_run(storage, "one", steps=0)
    with pytest.raises(UserError, match="has logged no step yet"):
        doctor_run.report(run.uri, False)
    write_lines(run, "metrics.jsonl", [entry(1)])
    run.write("plan.json", b'{"rows": "many"}')
    with pytest.raises(UserError, match="plan.json is damaged"):
        doctor_run.report(run.uri, False)


def test_a_run_that_may_only_be_read_is_reported_without_a_picture(storage, raised, capsys, monkeypatch):
    run = make_run(storage, "one")

    def refuse(self, name, content):
        raise UserError(f"{name} cannot be written")

    monkeypatch.setattr(Store, "write", refuse)
    assert doctor_run.report(run.uri, False) == 0
    assert "no picture: health.png cannot be written" in capsys.readouterr().out


def test_a_run_in_s3_is_reported_and_gets_its_page_there(moto, no_aws, monkeypatch, raised, capsys):
    use(monkeypatch, moto)
    run = make_run(Store.at(f"s3://{filled(moto, {})}/runs"), "one")
    lease(run, released=True)
    assert doctor_run.report(run.uri, False) == 0
    assert f"curves: {run.uri}/health.png" in capsys.readouterr().out
    assert Image.open(io.BytesIO(run.read("health.png"))).format == "PNG"


# The page


@pytest.fixture
def drawn(monkeypatch):
    """What is handed to matplotlib, by panel: labels of curves, steps of marks (with their line), numbers over them, shades."""
    seen = {"curves": {}, "marks": {}, "numbers": {}, "shades": {}}

    def record(what, value):
        def call(axis, *arguments, **rest):
            seen[what].setdefault(axis.get_title(loc="left"), []).append(value(arguments, rest))
            return original[what](axis, *arguments, **rest)

        return call

    original = {"curves": Axes.plot, "marks": Axes.axvline, "numbers": Axes.annotate, "shades": Axes.axvspan}
    monkeypatch.setattr(Axes, "plot", record("curves", lambda arguments, rest: rest["label"].partition(":")[0]))
    monkeypatch.setattr(Axes, "axvline", record("marks", lambda arguments, rest: (arguments[0], rest["linestyle"])))
    monkeypatch.setattr(Axes, "annotate", record("numbers", lambda arguments, rest: (arguments[0], rest["xy"][0])))
    monkeypatch.setattr(Axes, "axvspan", record("shades", lambda arguments, rest: arguments))
    return seen


def test_every_panel_has_its_curves_its_marks_and_the_shade_of_a_filling_queue(drawn):
    entries = [complete(step) for step in range(1, 101)] + [evaluation(60, 0.7), evaluation(30, 0.5)]
    happened = [Happening(8, "stale dictionary", "8.7"), Happening(9, "collapse", "0"), Happening(50, "input bound", "31 %"), Happening(40)]
    with Image.open(io.BytesIO(draw_health(entries, "one", happened))) as page:
        assert page.width == 1980 and page.height > 1500
        ink = {pixel: count for count, pixel in page.convert("RGB").getcolors(1 << 24)}
    assert ink[tuple(bytes.fromhex(SHADE[1:]))] > 4 * 1000
    titles = [panel.title for panel in PANELS]
    assert sorted(drawn["curves"]) == sorted(titles) and len(titles) == 12
    assert sum(map(len, drawn["curves"].values())) == sum(len(panel.metrics) for panel in PANELS)
    for title in titles:
        assert set(drawn["marks"][title]) == {(8, "-"), (9, "-"), (50, "-"), (40, ":")}
        assert drawn["numbers"][title] == [("1, 2", 8), ("3", 50)], "numbers that would hide each other stand together"
    assert drawn["shades"] == {panel.title: [(0, 4)] for panel in PANELS if panel.waits_for_queue}


def test_what_an_older_run_did_not_record_has_no_panel_and_is_named(drawn, monkeypatch):
    footers = []
    page = health_page.Page
    monkeypatch.setattr(health_page, "Page", lambda title, footer, *rest, **more: footers.append(footer) or page(title, footer, *rest, **more))
    draw_health([entry(step, queue_fill=1.0) for step in range(1, 11)], "one", [])
    assert drawn["curves"]["Top-1 in the queue and among the step's keys"] == ["queue"], "top-1 as the loss has it"
    assert "Drift of the keys in the queue" not in drawn["curves"] and drawn["shades"] == {} and drawn["marks"] == {}
    assert "Not recorded in this run: softmax mass on the negatives by age; drift of the keys in the queue;" in footers[0] and "Shaded" not in footers[0]


def test_curves_go_by_step_however_late_a_point_was_written():
    curves = curves_of([complete(2), complete(1), evaluation(2, 0.5), evaluation(1, 0.4), {"step": 3, "loss": "x"}], PANELS)
    assert curves["knn_top1"] == ([1, 2], [0.4, 0.5]) and curves["loss"].steps == [1, 2] and curves["drift"].values == pytest.approx([0.101, 0.102])
    with pytest.raises(UserError, match="no metric to draw yet"):
        draw_health([{"step": 3}], "one", [])
