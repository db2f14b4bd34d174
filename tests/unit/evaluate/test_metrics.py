"""Metrics against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, log_loss, roc_auc_score

from dtrain.metrics import accuracy, classification, cross_entropies, macro_f1, roc_auc


@pytest.mark.parametrize("classes", [1, 2, 7])
@pytest.mark.parametrize("count", [1, 5, 400])
def test_class_metrics_agree(classes, count):
    rng = np.random.default_rng(classes * 1000 + count)
    labels = rng.integers(0, classes, count)
    predicted = np.where(rng.random(count) < 0.5, labels, rng.integers(0, classes, count))
    assert accuracy(predicted, labels) == accuracy_score(labels, predicted)
    wanted = f1_score(labels, predicted, average="macro")
    assert macro_f1(predicted, labels) == pytest.approx(wanted, abs=1e-14)


def test_macro_f1_leaves_out_classes_that_do_not_occur():
    labels, predicted = np.array([0, 0, 4, 6]), np.array([0, 5, 4, 0])
    wanted = f1_score(labels, predicted, average="macro")
    assert macro_f1(predicted, labels) == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("decimals", [0, 1, 12])
def test_roc_auc_agrees_with_and_without_ties(decimals):
    rng = np.random.default_rng(decimals)
    labels = rng.integers(0, 2, 500)
    scores = np.round(rng.normal(size=500) + labels, decimals)
    assert roc_auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-14)


def test_roc_auc_of_all_ties_and_of_one_class():
    assert roc_auc(np.zeros(4), np.array([0, 1, 1, 0])) == 0.5
    assert roc_auc(np.arange(4.0), np.ones(4, np.int64)) is None
    assert roc_auc(np.arange(4.0), np.zeros(4, np.int64)) is None


def test_cross_entropy_agrees_and_does_not_overflow():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(50, 4)).astype(np.float32), rng.integers(0, 4, 50)
    rows = np.exp(logits.astype(np.float64))
    wanted = log_loss(labels, rows / rows.sum(axis=1, keepdims=True), labels=range(4))
    assert np.mean(cross_entropies(logits, labels)) == pytest.approx(wanted, abs=1e-12)
    far = cross_entropies(np.array([[1e4, 0.0], [0.0, 1e4]]), np.array([0, 0]))
    assert far.tolist() == [0, 10_000]


@pytest.mark.parametrize("classes", [2, 5])
def test_chunks_and_chosen_rows_change_no_bit(classes):
    rng = np.random.default_rng(classes)
    logits = rng.normal(size=(300, classes)).astype(np.float32)
    nodes = rng.permutation(300)[:111]
    labels = rng.integers(0, classes, 111)
    wanted = classification(logits[nodes], labels)
    assert len(wanted) == (5 if classes == 2 else 4)
    for chunk_rows in (1, 10, 111, 1000):
        assert classification(logits, labels, nodes, chunk_rows=chunk_rows) == wanted


def test_classification_leaves_out_what_is_not_defined():
    assert classification(np.empty((0, 2)), np.empty(0, np.int64)) == {"count": 0}
    one_class = classification(np.eye(2), np.zeros(2, np.int64))
    assert set(one_class) == {"count", "loss", "accuracy", "macro_f1"}
    three = classification(np.eye(3), np.arange(3))
    assert "roc_auc" not in three
    broken = classification(np.array([[np.nan, 0.0], [1.0, 2.0]]), np.array([0, 1]))
    assert "roc_auc" not in broken
    assert np.isnan(broken["loss"])
