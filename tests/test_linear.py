"""The linear classifier against scikit-learn's on a real set, and what its numbers mean."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from moco_ray.errors import UserError
from moco_ray.evaluate.confusion import confusion_picture
from moco_ray.evaluate.features import colour_histogram
from moco_ray.evaluate.knn import knn_predict
from moco_ray.evaluate.linear import fit, linear_accuracy
from moco_ray.evaluate.sheet import nearest_others, sheet


@pytest.fixture(scope="module")
def digits():
    """Features and labels of 1,797 real digits: bank, query."""
    held = load_digits()
    x, y = torch.from_numpy(held.data), torch.from_numpy(held.target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1200]], y[order[:1200]], x[order[1200:]], y[order[1200:]]


@pytest.mark.parametrize("l2", [1e-1, 1e-3])
def test_the_classifier_is_scikit_learn_s_with_the_same_objective(digits, l2):
    x, y, test_x, test_y = digits
    scaler = StandardScaler().fit(x)
    theirs = LogisticRegression(C=1 / (len(x) * l2), tol=1e-8, max_iter=5000).fit(scaler.transform(x), y)
    weights = fit(torch.from_numpy(scaler.transform(x)), y, 10, l2)
    assert np.abs(weights[:-1].T.numpy() - theirs.coef_).max() < 2e-3 * np.abs(theirs.coef_).max()
    found = linear_accuracy(x, y, test_x, test_y, l2_grid=[l2])
    assert abs(found.top1 - theirs.score(scaler.transform(test_x), test_y)) <= 0.005 and found.top1 > 0.9


def test_nearest_neighbours_are_scikit_learn_s(digits):
    x, y, test_x, _ = digits
    unit = torch.nn.functional.normalize(x), torch.nn.functional.normalize(test_x)
    theirs = KNeighborsClassifier(7, weights=lambda d: np.exp((1 - d) / 0.1), metric="cosine", algorithm="brute").fit(unit[0], y)
    assert knn_predict(x, y, test_x, (7,))[0].tolist() == theirs.predict(unit[1]).tolist()


def test_the_regularisation_is_chosen_on_held_out_training_rows_never_on_the_test_rows(digits):
    x, y, test_x, test_y = digits
    noisy = torch.cat([x, 8 * torch.randn(len(x), 600, dtype=x.dtype, generator=torch.Generator().manual_seed(1))], 1)[:300]
    test_noisy = torch.cat([test_x, torch.randn(len(test_x), 600, dtype=x.dtype)], 1)
    strong = linear_accuracy(noisy, y[:300], test_noisy, test_y)
    assert strong.l2 == 1e-1  # 664 features and 300 rows want much of it
    assert linear_accuracy(noisy, y[:300], -test_noisy, test_y.roll(1)).l2 == strong.l2  # whatever the test rows are
    assert linear_accuracy(x, y, test_x, test_y) == linear_accuracy(x, y, test_x, test_y)


def test_top5_per_class_and_confusion_are_counts_of_the_same_predictions(digits):
    x, y, test_x, test_y = digits
    keep = test_y != 3
    found = linear_accuracy(x, y, test_x[keep], test_y[keep], l2_grid=[1e-2])
    counts = np.array(found.confusion)
    assert counts.sum() == int(keep.sum()) and found.top1 == pytest.approx(np.trace(counts) / counts.sum())
    assert found.per_class[3] is None and found.per_class[5] == pytest.approx(counts[5, 5] / counts[5].sum())
    assert found.top1 < found.top5 <= 1.0
    assert linear_accuracy(x[y < 5], y[y < 5], test_x[test_y < 5], test_y[test_y < 5], l2_grid=[1e-2]).top5 is None


def test_what_cannot_be_told_apart_is_refused_with_the_cure(digits):
    x, y, test_x, test_y = digits
    for change, words in (
        ({"labels": torch.zeros_like(y)}, "all of one class"),
        ({"labels": y.clamp(max=8)}, "class 9, which no training row has"),
        ({"features": x.where(x < 16, torch.nan)}, "training features hold values that are not finite"),
        ({"test_features": test_x[:, :5]}, "one D"),
        ({"test_labels": test_y.double()}, "test labels must be 597 int64"),
    ):
        with pytest.raises(UserError, match=words):
            linear_accuracy(**{"features": x, "labels": y, "test_features": test_x, "test_labels": test_y, **change})


def test_a_feature_that_never_changes_does_no_harm(digits):
    x, y, test_x, test_y = digits
    constant, test_constant = x.clone(), test_x.clone()
    constant[:, 5], test_constant[:, 5] = 7.0, 9.0
    dropped = [column for column in range(64) if column != 5]
    with_it = linear_accuracy(constant, y, test_constant, test_y, l2_grid=[1e-2])
    assert with_it.top1 == linear_accuracy(x[:, dropped], y, test_x[:, dropped], test_y, l2_grid=[1e-2]).top1


def test_nearest_others_are_a_slow_loop_s_without_the_query_itself():
    features = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    features[7] = features[3] * 2  # a twin: as near as can be
    queries = torch.tensor([3, 39, 0])
    found = nearest_others(features, queries, 5)
    for line, query in enumerate(queries.tolist()):
        cosine = {n: float(torch.cosine_similarity(features[n], features[query], dim=0)) for n in range(40) if n != query}
        assert found.places[line].tolist() == sorted(cosine, key=lambda n: -cosine[n])[:5]
        assert found.similarity[line].tolist() == pytest.approx(sorted(cosine.values(), reverse=True)[:5], abs=1e-6)
    assert found.places[0, 0] == 7


def test_a_colour_histogram_is_the_root_of_the_share_of_each_colour():
    crops = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    crops[0, :2] = torch.tensor([255, 0, 40], dtype=torch.uint8)  # levels 7, 0, 1
    found = colour_histogram(crops)
    assert found.shape == (2, 512) and found[0, 7 * 64 + 1] == found[0, 0] == pytest.approx(0.5**0.5) and found[1, 0] == 1.0
    assert found.square().sum(1).tolist() == pytest.approx([1.0, 1.0])


def test_the_confusion_s_picture_has_names_where_there_is_room():
    few = confusion_picture([[3, 1], [0, 4]], ["cat", "dog"], "few")
    many = confusion_picture(np.eye(100, dtype=int).tolist(), [], "many")
    for content in (few, many):
        assert Image.open(io.BytesIO(content)).size[0] > 400


def test_a_sheet_shows_each_query_first_and_is_large_enough_to_see(digits):
    pictures = np.random.default_rng(0).integers(0, 256, (3, 5, 16, 16, 3), dtype=np.uint8)
    one = Image.open(io.BytesIO(sheet(pictures[:, 0], pictures[:, 1:], np.full((3, 4), 0.5), "title"))).convert("RGB")
    wide = Image.open(io.BytesIO(sheet(pictures[:1, 0], pictures[:1, 1:], np.full((1, 4), 0.5), "title")))
    assert one.size[0] > 500 and one.size[1] > wide.size[1] > 100
    colours = {tuple(colour) for colour in np.asarray(one).reshape(-1, 3).tolist()}
    assert {tuple(pixel) for pixel in pictures[2, 0].reshape(-1, 3).tolist()} <= colours  # the pixels themselves, not smoothed
