"""What TensorBoard shows of a run: pictures of a step with the right images in them, histograms, layout, texts; without Ray."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from moco_ray import pictures
from moco_ray.data.decode import decode
from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.data.segment import Segments, Source, read_rows, segment_steps
from moco_ray.data.storage import Store
from moco_ray.data.survey import build_manifest
from moco_ray.exhibit import BUCKETS, NEGATIVES, QUERIES, Step, exhibit, histogram
from moco_ray.method.queue import Queue
from moco_ray.monitor import Journal
from moco_ray.pictures import Gallery
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import field_names
from moco_ray.tensorboard_page import BESIDE, LAYOUT, TAGS, hyperparameters
from moco_ray.train import train
from moco_ray.verdicts import Verdict
from tests import synthetic
from tests.test_learning import rows_without_ray


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """200 drawn images, 6 steps of 32 rows an epoch."""
    folder = tmp_path_factory.mktemp("drawn")
    drawn_prototypes(folder, rows=200, test_rows=50)
    recipe = synthetic.recipe(run={"images_every_steps": 5}, schedule={"steps": 13}, augment={"image_pixels": 32})
    manifest = build_manifest(str(folder / "train"), "image")
    return Source(manifest, recipe, Plan(recipe, manifest.rows))


@pytest.fixture(scope="module")
def shown(source) -> list[dict]:
    """What rank 0 tells of a run of 13 steps, its pictures at every fifth and where else they are due."""
    told, learner = [], synthetic.small_learner(source.recipe)

    def picture(step: Step):
        told.append({"step": learner.step + 1, **exhibit(step, source.plan), "true": (step.queue.keys.clone(), step.queries.clone())})

    outputs = synthetic.Log().outputs()._replace(picture=picture)
    train(learner, rows_without_ray(source), source.plan, Ranks(), outputs)
    return told


def test_pictures_are_taken_at_the_first_step_every_so_many_with_the_queue_just_full_and_at_the_end_or_never(source, shown):
    assert [message["step"] for message in shown] == [1, 5, 6, 11, 13]  # a queue of 100 is full after four steps of 32
    assert [bool((message["made"] >= 0).all()) for message in shown] == [False, True, True, True, True]
    told, none = [], dataclasses.replace(source, plan=Plan(synthetic.recipe(run={"images_every_steps": 0}), source.plan.rows))
    outputs = synthetic.Log().outputs()._replace(picture=told.append)
    rows = (batch for _, batch in zip(range(2), synthetic.batches(none.plan, Ranks()), strict=False))
    with pytest.raises(StopIteration):
        train(synthetic.small_learner(none.plan.recipe), rows, none.plan, Ranks(), outputs)
    assert told == []


def test_the_hardest_negatives_are_those_of_the_queue_as_the_loss_saw_it(shown):
    keys, queries = shown[3]["true"]
    similarity = queries[:QUERIES] @ keys.T
    for q in range(QUERIES):
        order = np.argsort(-similarity[q].numpy())[:NEGATIVES]
        assert shown[3]["slots"][q].tolist() == order.tolist()
        assert shown[3]["similarity"][q] == pytest.approx(similarity[q, order].numpy(), abs=1e-6)


def test_the_image_beside_a_negative_is_the_one_that_its_key_was_made_of(source, shown):
    """Against the rows that the segments of the run give out, for all slots asked for."""
    message = shown[3]  # before step 10: 320 keys went through a queue of 100
    rows = [step["row"] for segment in Segments(source.plan, 1, 0, 0) for step in segment_steps(source, range(8), segment)]
    through = np.concatenate(rows)[: 10 * 32]
    found = Gallery(source.manifest, source.plan, 0)._rows(message)
    for slot, made, row in zip(message["slots"].ravel(), message["made"].ravel(), found.ravel(), strict=True):
        last = max(n for n in range(len(through)) if n % 100 == slot)
        assert (through[last], last // 32) == (row, made)


def test_two_views_are_what_the_encoders_saw(source, shown):
    from moco_ray.data.augment import colour_stage

    batch = next(rows_without_ray(source))
    augment, run = source.recipe.augment, source.recipe.run
    for view in (0, 1):
        x = colour_stage(batch.crops[:, view], batch.positions.numpy(), view, run.seed, 0, augment).numpy()
        back = x * np.array(augment.std)[:, None, None] + np.array(augment.mean)[:, None, None]
        seen = shown[0]["views"][:, view].transpose(0, 3, 1, 2)
        assert np.abs(seen - np.clip(back[:12], 0, 1) * 255).max() <= 0.51


def test_counts_of_a_histogram_are_numpy_s():
    values = np.random.default_rng(0).uniform(-1.0, 1.0, 5000)
    found = histogram(torch.from_numpy(values))
    assert found["bucket_counts"] == np.histogram(values, BUCKETS, (-1, 1))[0].tolist()
    assert found["bucket_limits"] == pytest.approx(np.linspace(-1, 1, BUCKETS + 1)[1:])
    numbers = [found[name] for name in ("min", "max", "sum", "sum_squares")]
    assert numbers == pytest.approx([values.min(), values.max(), values.sum(), (values**2).sum()])
    assert sum(histogram(torch.tensor([1.0000001, -1.0000001]))["bucket_counts"]) == 2  # float32's own slack is counted


def test_histograms_hold_every_pair_of_their_kind_and_no_noise(shown):
    counts = [{name: held["num"] for name, held in message["histograms"].items()} for message in shown]
    assert counts[0] == {"positive": 32, "step_negative": 32 * 31}  # the queue is empty
    assert counts[1] == counts[2] == {"positive": 32, "step_negative": 32 * 31, "queued_negative": 32 * 100}


def test_a_step_that_is_not_finite_shows_nothing(source):
    batch = next(rows_without_ray(source))
    keys = torch.nn.functional.normalize(torch.randn(32, 16, dtype=torch.float64))
    step = Step(batch, keys.clone(), keys, range(32), Queue(100, 16, 0, dtype=torch.float64))
    assert exhibit(step, source.plan) is not None
    step.queries[7, 3] = float("nan")
    assert exhibit(step, source.plan) is None


def seen(folder) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0, "histograms": 0, "scalars": 0}).Reload()


def test_pictures_reach_tensorboard_once_and_a_restart_takes_none_twice(source, shown, tmp_path):
    gallery, journal = Gallery(source.manifest, source.plan, 0), Journal(Store(str(tmp_path)), source.plan, 0)
    for message in [shown[0], shown[3], shown[3]]:  # the last: computed again
        gallery.hang(message)
        (made,) = gallery.finished(60)
        assert made.flaw == ""
        journal.pictures(made.step, made.images, made.histograms)
    gallery.close()
    journal.close()
    page = seen(tmp_path / "tensorboard")
    assert page.Tags()["images"] == ["pictures/two_views", "pictures/hardest_negatives"]
    for tag in page.Tags()["images"]:
        assert [image.step for image in page.Images(tag)] == [1, 11]
        picture = Image.open(io.BytesIO(page.Images(tag)[1].encoded_image_string))
        assert picture.size == (page.Images(tag)[1].width, page.Images(tag)[1].height)
    # the thumbnail of the first negative is that row's image, at its place
    row = Gallery(source.manifest, source.plan, 0)._rows(shown[3])[0, 0]
    encoded = read_rows(source.manifest, np.array([row]))[row]
    thumb = np.asarray(pictures._square(Image.fromarray(decode(encoded, 10**6).permute(1, 2, 0).numpy())), float)
    left, top = 3 * pictures.GAP + 2 * (96 + pictures.GAP), 3 * pictures.LINE + 2 * pictures.GAP
    wall = np.asarray(picture, float)[top : top + 96, left : left + 96]
    assert np.abs(wall - thumb).mean() < 4  # JPEG; another row's is 30 away
    assert sorted(page.Tags()["histograms"]) == ["similarity/positive", "similarity/queued_negative", "similarity/step_negative"]


def test_a_storage_that_gives_no_image_costs_the_wall_and_nothing_else(source, shown, monkeypatch):
    def refuse(manifest, rows):
        raise OSError("no answer from the storage")

    monkeypatch.setattr(pictures, "read_rows", refuse)
    gallery = Gallery(source.manifest, source.plan, 0)
    gallery.hang(shown[3])
    (made,) = gallery.finished(60)
    assert list(made.images) == ["pictures/two_views"] and len(made.histograms) == 3
    assert made.flaw == "no picture of the hardest negatives of step 11: no answer from the storage"


def test_the_page_names_every_scalar_once_and_charts_only_scalars_that_there_are():
    charted = [name for charts in LAYOUT.values() for names in charts.values() for name in names]
    assert set(charted) <= set(TAGS) and len(charted) == len(set(charted))
    beside = {name for name in BESIDE.values() if isinstance(name, str)} - {"chance_loss"}  # drawn as references
    assert set(TAGS) - set(charted) - beside == {"top1_gap", "step_positive_similarity", "knn_left_out"}  # on the page Scalars
    assert len(set(TAGS.values())) == len(TAGS)


def test_layout_hparams_recipe_environment_and_verdicts_are_in_the_run_and_no_further_run_appears(source, tmp_path):
    journal = Journal(Store(str(tmp_path)), source.plan, 0)
    code = {"git_commit": "abc", "git_dirty": True, "python": "3.11", "versions": {"torch": "2.14"}}
    journal.begun(0, code, ["a", "b"], ["GPU x, 80 GiB", "CPU y, 2 CPUs"])
    scalars = {name: 0.5 for name in TAGS if name not in ("verdicts", "knn_top1")}
    journal.record({**scalars, "step": 1, "chance_loss": 5.0}, [])
    stale = Verdict("stale_dictionary", 2, "queued keys are 8 times easier", "they are old", "raise m")
    journal.event("verdict", 2, stale.text, **{name: value for name, value in stale._asdict().items() if name != "step"})
    journal.record({**scalars, "step": 3, "chance_loss": 5.0}, [])
    journal.record({"step": 3, "knn_top1": 0.5, "knn_untrained": 0.25}, [])
    journal.record({"step": 6, "knn_top1": 0.75}, [])  # the untrained network is judged once
    journal.close()
    page = seen(tmp_path / "tensorboard")
    layout = layout_pb2.Layout.FromString(page.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["Learning", "Dictionary", "Input", "System", "Events"]
    assert {f"^{tag}$" for tag in TAGS.values()} >= {tag for c in layout.category for chart in c.chart for tag in chart.multiline.tag}
    assert set(TAGS.values()) == set(page.Tags()["scalars"])
    assert [(point.step, point.value) for point in page.Scalars(TAGS["verdicts"])] == [(1, 0), (3, 1)]
    beside = seen(tmp_path / "tensorboard" / "reference")
    values = {tag: beside.Scalars(tag)[0].value for tag in beside.Tags()["scalars"]}
    assert set(values) == {TAGS[name] for name in [*BESIDE, "effective_rank"]}
    assert [(point.step, point.value) for point in beside.Scalars(TAGS["knn_top1"])] == [(3, 0.25), (6, 0.25)]
    assert values["learning/loss"] == 5.0 and values["dictionary/effective_rank"] == 16 and values["dictionary/queue_top1"] == 0.5
    words = {name: [t.tensor_proto.string_val[0].decode() for t in page.Tensors(f"{name}/text_summary")] for name in
             ("recipe", "environment", "events/verdicts", "events")}  # fmt: skip
    assert "queue_keys = 100" in words["recipe"][0] and "| chance loss | 4.615" in words["recipe"][0]
    for part in ("abc, with changes", "| torch | 2.14 |", "| worker 1 | b: CPU y, 2 CPUs |"):
        assert part in words["environment"][0]
    assert words["events/verdicts"][0].startswith("No verdict") and "| 2 | stale dictionary | queued keys are 8 times easier | they are old | raise m |" in words["events/verdicts"][-1]
    assert sorted(p.name for p in (tmp_path / "tensorboard").iterdir() if p.is_dir()) == ["reference"]
    assert "_hparams_/session_start_info" in page.summary_metadata


def test_runs_are_compared_by_the_recipe_s_values():
    values = hyperparameters(synthetic.plan(synthetic.recipe()))
    assert values["contrast.queue_keys"] == 100 and values["augment.crop_scale"] == "0.2, 1.0" and values["rows"] == 300
    assert set(values) - {"rows", "total_steps"} <= set(field_names())


def test_another_driver_counts_the_verdicts_of_the_one_before(source, tmp_path):
    first = Journal(Store(str(tmp_path)), source.plan, 0)
    first.event("verdict", 2, "collapse: ..", name="collapse", seen="..", means="..", change="..")
    first.close()
    second = Journal(Store(str(tmp_path)), source.plan, 0)
    second.record({"step": 3, "loss": 1.0, "chance_loss": 5.0}, [])
    second.close()
    assert [point.value for point in seen(tmp_path / "tensorboard").Scalars(TAGS["verdicts"])] == [1]
