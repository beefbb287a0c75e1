"""Nearest neighbours against a slow reading in NumPy and a case by hand; the draws of few labels; the table."""

import json
import math

import numpy as np
import pytest
import torch

from moco_ray.errors import UserError
from moco_ray.evaluate import knn, table
from moco_ray.evaluate.knn import draw_rows, few_labels, knn_accuracy, knn_predict
from moco_ray.evaluate.linear import Linear, linear_accuracy


def clouds(rows: int, dimensions: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlapping clouds of features, so that neighbours disagree: rows,D float64 and rows int64."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (rows,), generator=generator)
    centres = torch.randn(classes, dimensions, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    features = 0.7 * centres[labels] + torch.randn(rows, dimensions, generator=generator, dtype=torch.float64)
    return features * (1 + 3 * torch.rand(rows, 1, generator=generator, dtype=torch.float64)), labels


def slow_votes(bank, labels, query, k, temperature, classes) -> np.ndarray:
    """Wu et al. 2018, section 3.4, one query and one neighbour at a time: Q,classes."""
    votes = np.zeros((len(query), classes))
    for i, q in enumerate(query):
        similarity = [float(q @ row) / (np.linalg.norm(q) * np.linalg.norm(row)) for row in bank]
        for j in sorted(range(len(bank)), key=lambda row: -similarity[row])[:k]:
            votes[i, labels[j]] += math.exp(similarity[j] / temperature)
    return votes


@pytest.mark.parametrize("k", [1, 3, 20, 90])
def test_predictions_are_those_of_a_slow_loop_over_queries_and_neighbours(k):
    (bank, labels), (query, _) = clouds(90, 5, 4, seed=0), clouds(60, 5, 4, seed=1)
    expected = slow_votes(bank.numpy(), labels.numpy(), query.numpy(), k, 0.5, 4).argmax(axis=1)
    assert len(set(expected)) == 4
    assert knn_predict(bank, labels, query, (k,), 0.5)[0].tolist() == expected.tolist()


def test_the_worked_example_by_hand():
    """Query (1,0); bank at cosine 1 (class 0), 0.8 and 0.6 (class 1): votes e^(1/t) against e^(0.8/t) + e^(0.6/t)."""
    bank = torch.tensor([[2.0, 0.0], [0.4, 0.3], [6.0, -8.0], [0.0, 7.0]])
    labels, query = torch.tensor([0, 1, 1, 2]), torch.tensor([[5.0, 0.0]])
    # t = 1: 2.718 against 2.226 + 1.822 = 4.048; t = 0.1: 22026 against 2981 + 403 = 3384
    assert knn_predict(bank, labels, query, (3,), temperature=1.0).tolist() == [[1]]
    assert knn_predict(bank, labels, query, (3,), temperature=0.1).tolist() == [[0]]
    assert knn_predict(bank, labels, query, (1, 2, 3), temperature=1.0).tolist() == [[0], [0], [1]]


def test_several_k_at_once_are_each_k_alone_in_any_order():
    (bank, labels), (query, wanted) = clouds(80, 6, 5, seed=2), clouds(70, 6, 5, seed=3)
    together = knn_accuracy(bank, labels, query, wanted, (50, 1, 7), temperature=1.0)
    alone = {k: knn_accuracy(bank, labels, query, wanted, (k,), temperature=1.0)[k] for k in (50, 1, 7)}
    assert together == alone and len(set(together.values())) == 3


@pytest.mark.parametrize("block_rows", [1, 7, 69, 70, 1000])
def test_a_block_of_queries_gives_what_the_whole_gives(block_rows, monkeypatch):
    (bank, labels), (query, _) = clouds(80, 6, 5, seed=2), clouds(70, 6, 5, seed=3)
    whole = knn_predict(bank, labels, query, (1, 9), block_rows=70)
    assert torch.equal(knn_predict(bank, labels, query, (1, 9), block_rows=block_rows), whole)
    monkeypatch.setattr(knn, "BLOCK_VALUES", 200)  # two queries against 80 rows
    assert torch.equal(knn_predict(bank, labels, query, (1, 9), block_rows=block_rows), whole)


def test_a_block_never_holds_more_similarities_than_its_bound(monkeypatch):
    (bank, labels), (query, _) = clouds(80, 6, 5, seed=2), clouds(70, 6, 5, seed=3)
    monkeypatch.setattr(knn, "BLOCK_VALUES", 200)
    sizes, vote = [], knn._vote

    def record(similarity, *rest):
        sizes.append(similarity.numel())
        return vote(similarity, *rest)

    monkeypatch.setattr(knn, "_vote", record)
    knn_predict(bank, labels, query, (1,))
    assert max(sizes) == 160 and sum(sizes) == 80 * 70


def test_a_small_temperature_does_not_overflow_and_of_equal_votes_the_smallest_class_wins():
    bank, query = torch.tensor([[1.0, 0.0], [0.9, 0.1]]), torch.tensor([[1.0, 0.0]])
    assert knn_predict(bank, torch.tensor([3, 1]), query, (2,), temperature=1e-3).tolist() == [[3]]  # exp(1000) is inf
    assert knn_predict(query.expand(2, 2), torch.tensor([3, 1]), query, (2,)).tolist() == [[1]]


def test_half_precision_features_are_compared_in_float32():
    """Lengths beyond 65504, the largest float16, would become infinite and every direction zero."""
    bank = torch.tensor([[5e4, 5e4, 0.0], [5e4, -5e4, 0.0]], dtype=torch.float16)
    assert knn_predict(bank, torch.tensor([0, 1]), bank.flip(0), (1,)).tolist() == [[1, 0]]


def test_more_neighbours_than_the_bank_has_are_refused_with_the_cure():
    bank, labels = clouds(30, 4, 3, seed=0)
    with pytest.raises(UserError, match="200 neighbours .* 30 rows .* larger bank or at most 30"):
        knn_accuracy(bank, labels, bank, labels, (20, 200))
    assert knn_accuracy(bank, labels, bank, labels, (30,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bank_features": torch.zeros(30, 5)}, "one D"),
        ({"bank_labels": torch.zeros(29, dtype=torch.int64)}, "30 int64"),
        ({"bank_labels": torch.zeros(30)}, "int64"),
        ({"bank_labels": torch.full((30,), -1)}, "0..2"),
        ({"query_labels": torch.zeros(3, dtype=torch.int64)}, "query labels"),
        ({"query_features": torch.full((30, 4), torch.nan)}, "not finite"),
        ({"temperature": 0.0}, "above 0"),
        ({"neighbours": ()}, "above 0"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    features, labels = clouds(30, 4, 3, seed=0)
    parts = {"bank_features": features, "bank_labels": labels, "query_features": features, "query_labels": labels}
    with pytest.raises(UserError, match=message):
        knn_accuracy(**{**parts, "neighbours": (1,), "classes": 3, **change})


def test_drawn_rows_are_balanced_distinct_and_seeded():
    labels = clouds(300, 2, 6, seed=4)[1] * 2  # odd classes have no row
    rows = draw_rows(labels, 10, draw=0, seed=1, classes=12)
    assert len(set(rows.tolist())) == 60
    assert torch.bincount(labels[rows], minlength=12).tolist() == [10, 0] * 6
    assert torch.equal(rows, draw_rows(labels, 10, draw=0, seed=1, classes=12))
    others = [draw_rows(labels, 10, draw, seed, 12) for draw, seed in ((1, 1), (0, 2))]
    assert not any(torch.equal(rows, other) for other in others)


def test_few_labels_is_1nn_from_the_drawn_rows_alone_mean_and_sample_std():
    (bank, labels), (query, wanted) = clouds(200, 5, 4, seed=5), clouds(50, 5, 4, seed=6)
    accuracies = []
    for draw in range(5):
        rows = draw_rows(labels, 10, draw, seed=3, classes=4)
        votes = slow_votes(bank[rows].numpy(), labels[rows].numpy(), query.numpy(), 1, 1.0, 4)
        accuracies.append((votes.argmax(axis=1) == wanted.numpy()).mean())
    mean, std = few_labels(bank, labels, query, wanted, labels_per_class=10, draws=5, seed=3)
    assert len(set(accuracies)) > 1
    assert mean == pytest.approx(np.mean(accuracies)) and std == pytest.approx(np.std(accuracies, ddof=1))
    assert few_labels(bank, labels, query, wanted, draws=1, seed=3) == (pytest.approx(accuracies[0]), 0.0)


def test_a_class_with_too_few_rows_is_named():
    labels = torch.tensor([0] * 10 + [1] * 9)
    with pytest.raises(UserError, match="class 1 has 9 rows"):
        few_labels(torch.randn(19, 3), labels, torch.randn(2, 3), torch.tensor([0, 1]))


def test_leaving_one_out_is_the_slow_reading_without_the_row_itself():
    features, labels = clouds(60, 5, 4, seed=0)
    expected = []
    for row in range(60):
        others = [other for other in range(60) if other != row]
        votes = slow_votes(features[others].numpy(), labels[others].numpy(), features[row : row + 1].numpy(), 7, 0.5, 4)
        expected.append(int(votes.argmax()))
    for block_rows in (13, 512):
        found = knn_predict(features, labels, features, (7,), 0.5, block_rows=block_rows, leave_one_out=True)
        assert found[0].tolist() == expected
    assert knn_predict(features, labels, features, (1,))[0].tolist() == labels.tolist() != expected  # else each finds itself
    with pytest.raises(UserError, match="60 neighbours are more"):
        knn_predict(features, labels, features, (60,), leave_one_out=True)
    draws = []
    for draw in range(3):
        rows = draw_rows(labels, 5, draw, seed=1, classes=4)
        asked = [row for row in range(60) if row not in set(rows.tolist())]
        votes = slow_votes(features[rows].numpy(), labels[rows].numpy(), features[asked].numpy(), 1, 1.0, 4)
        draws.append((votes.argmax(axis=1) == labels[asked].numpy()).mean())
    assert few_labels(features, labels, features, labels, 5, 3, seed=1, leave_one_out=True)[0] == pytest.approx(np.mean(draws))


def test_the_table_states_every_number_in_text_markdown_and_json():
    (bank, labels), (query, wanted) = clouds(300, 5, 4, seed=5), clouds(50, 5, 4, seed=6)
    protocol = table.Protocol.fitting(labels, leave_one_out=False)
    assert protocol == table.Protocol((10, 20, 100, 200), (1, 10), True, False)  # no class has 100 rows
    rows = table.compare({"raw pixels": (bank, query), "trained encoder": (bank[:, :3], query[:, :3])}, labels, wanted, protocol)
    assert [row.name for row in rows] == ["raw pixels", "trained encoder"]
    assert rows[1].knn[0.07] == knn_accuracy(bank[:, :3], labels, query[:, :3], wanted, (10, 20, 100, 200), 0.07)
    assert rows[0].few_labels == {n: few_labels(bank, labels, query, wanted, n) for n in (1, 10)}
    assert rows[0].linear == linear_accuracy(bank, labels, query, wanted)
    one = Linear(0.625, None, [0.5, 0.75], [[1, 1], [1, 3]], 0.01)
    row = table.Row("raw pixels", {0.1: {10: 0.4, 20: 0.5, 200: 0.4321}, 0.07: {10: 0.1}}, {1: (0.3, 0.1), 10: (0.3456, 0.012)}, one)
    assert table.as_text([row]).splitlines() == [
        "features    kNN k=20  kNN k=200  1 label/class  10 labels/class  linear",
        "-----------------------------------------------------------------------",
        "raw pixels      50.0       43.2    30.0 ± 10.0       34.6 ± 1.2    62.5",
    ]
    assert table.as_markdown([row]).splitlines() == [
        "| features | kNN k=20 | kNN k=200 | 1 label/class | 10 labels/class | linear |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| raw pixels | 50.0 | 43.2 | 30.0 ± 10.0 | 34.6 ± 1.2 | 62.5 |",
    ]
    (stored,) = json.loads(json.dumps(table.as_json([row])))
    assert stored["knn"] == {"0.1": {"10": 0.4, "20": 0.5, "200": 0.4321}, "0.07": {"10": 0.1}}
    assert stored["few_labels"]["10"] == {"mean": 0.3456, "std": 0.012, "draws": 5}
    assert stored["linear"] == {"top1": 0.625, "top5": None, "per_class": [0.5, 0.75], "confusion": [[1, 1], [1, 3]], "l2": 0.01}


def test_a_small_or_the_same_set_is_judged_by_what_it_has_rows_for():
    labels = torch.arange(15) % 3
    assert table.Protocol.fitting(labels, leave_one_out=False) == table.Protocol((10,), (1,), True, False)
    assert table.Protocol.fitting(labels, leave_one_out=True) == table.Protocol((10,), (1,), False, True)
    assert table.Protocol.fitting(labels[:6], leave_one_out=True).neighbours == (5,)
