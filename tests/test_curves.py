"""The page of curves: its size, what is on it, and what it says about files that do not hold a run."""

import json
import math

import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from moco_ray.errors import UserError
from moco_ray.evaluate import curves
from moco_ray.evaluate.curves import draw_curves

NAMES = [
    "loss", "chance_loss", "top1", "top5", "positive_similarity", "negative_similarity", "knn_top1",
    "learning_rate", "queue_fill", "images_per_second", "input_wait_share",
]  # fmt: skip


def training_line(step: int) -> dict:
    fill = min(1.0, step / 40)
    values = {name: 0.1 * place + step / 1000 for place, name in enumerate(NAMES, start=1) if name != "knn_top1"}
    return {"step": step, "epoch": step / 50, **values, "chance_loss": math.log(4097), "queue_fill": fill}


def write(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture
def metrics(tmp_path):
    """Ten training lines, two evaluation lines; the queue is full from step 40."""
    entries = [training_line(step) for step in range(10, 101, 10)]
    entries += [{"step": step, "epoch": step / 50, "knn_top1": step / 200} for step in (50, 100)]
    return write(tmp_path / "metrics.jsonl", entries)


@pytest.fixture
def drawn(monkeypatch):
    """What is handed to matplotlib: (panel, label) -> points, the shaded spans by panel, the texts. Renders nothing."""
    seen = {"curves": {}, "spans": {}, "texts": []}

    def record_plot(axis, steps, values, **rest):
        seen["curves"][axis.get_title(loc="left"), rest["label"]] = (list(steps), list(values))

    def record_span(axis, start, end, **rest):
        seen["spans"][axis.get_title(loc="left")] = (start, end)

    monkeypatch.setattr(Axes, "plot", record_plot)
    monkeypatch.setattr(Axes, "axvspan", record_span)
    monkeypatch.setattr(Axes, "legend", lambda axis, **rest: Artist())
    monkeypatch.setattr(Axes, "text", lambda axis, x, y, text, **rest: seen["texts"].append(text))
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **rest: path.write_bytes(b"page"))
    return seen


def colour_count(pixels: np.ndarray, colour: str) -> int:
    return int((pixels == tuple(bytes.fromhex(colour[1:]))).all(axis=-1).sum())


def test_the_page_has_the_stated_size_and_shows_curves_and_mark(metrics, tmp_path):
    assert draw_curves(metrics, tmp_path / "new" / "page.png", "a run") == NAMES
    with Image.open(tmp_path / "new" / "page.png") as page:
        assert page.size == (1320, 1500) and page.format == "PNG"
        pixels = np.asarray(page.convert("RGB"))
    assert colour_count(pixels, curves.SHADE) > 60_000  # the two legends of it have about 14,000
    for row in range(4):  # each panel has more ink of the first curve's colour than its legend
        for column in range(2):
            panel = pixels[row * 375 : (row + 1) * 375, column * 660 : (column + 1) * 660]
            assert colour_count(panel, curves.COLOURS[0]) > 300
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.png"]


def test_every_metric_is_drawn_point_by_point(metrics, tmp_path, drawn):
    draw_curves(metrics, tmp_path / "page.png", "a run")
    steps = list(range(10, 101, 10))
    assert len(drawn["curves"]) == len(NAMES)
    assert drawn["curves"]["Loss", "loss: 0.2"] == (steps, [0.1 + step / 1000 for step in steps])
    assert drawn["curves"]["Loss", "chance, log(K+1): 8.318"] == (steps, [math.log(4097)] * 10)
    assert drawn["curves"]["kNN accuracy on labelled images", "top-1: 50.0 %"] == ([50, 100], [0.25, 0.5])


def test_the_loss_is_marked_until_the_first_step_with_a_full_queue(metrics, tmp_path, drawn):
    draw_curves(metrics, tmp_path / "page.png", "a run")
    assert drawn["spans"] == {"Loss": (0, 40), "(K+1)-way choice": (0, 40)}


def test_nothing_is_marked_where_the_queue_was_full_or_its_fill_is_unknown(tmp_path, drawn):
    full = write(tmp_path / "full.jsonl", [training_line(step) for step in (50, 60)])
    unknown = write(tmp_path / "unknown.jsonl", [{"step": 10, "loss": 1.0}])
    for path in (full, unknown):
        draw_curves(path, tmp_path / "page.png", "a run")
    assert drawn["spans"] == {}


def test_a_queue_that_never_filled_is_marked_to_the_end(tmp_path, drawn):
    path = write(tmp_path / "m.jsonl", [training_line(step) for step in (10, 20, 30)])
    draw_curves(path, tmp_path / "page.png", "a run")
    assert drawn["spans"]["Loss"] == (0, 30)


def test_one_line_of_one_metric_makes_a_page(tmp_path):
    path = write(tmp_path / "m.jsonl", [{"step": 0, "loss": 8.3}])
    assert draw_curves(path, tmp_path / "page.png", "a run") == ["loss"]
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_metrics_that_the_file_lacks_are_not_drawn_and_not_missed(tmp_path, drawn):
    path = write(tmp_path / "m.jsonl", [{"step": 10, "epoch": 0.1, "knn_top1": 0.4}])
    assert draw_curves(path, tmp_path / "page.png", "a run") == ["knn_top1"]
    assert list(drawn["curves"].values()) == [([10], [0.4])]
    assert drawn["texts"] == ["not recorded in this run"] * 7


def test_a_last_line_that_was_cut_off_is_left_out_and_any_other_is_refused(metrics, tmp_path, drawn):
    whole = metrics.read_text()
    metrics.write_text(whole + '{"step": 110, "lo')
    assert draw_curves(metrics, tmp_path / "page.png", "a run") == NAMES
    metrics.write_text('{"step": 110, "lo\n' + whole)
    with pytest.raises(UserError, match="line 1 of"):
        draw_curves(metrics, tmp_path / "other.png", "a run")
    assert not (tmp_path / "other.png").exists()


@pytest.mark.parametrize("content", [None, "", "\n", '{"step": 3, "epoch": 0.1}\n', "[1, 2]\n"])
def test_a_missing_file_or_one_without_metrics_is_refused_with_the_cure(content, tmp_path):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="has logged a step"):
        draw_curves(path, tmp_path / "page.png", "a run")
    assert not (tmp_path / "page.png").exists()
