"""How good predictions are, exactly and in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


def accuracy(predicted: Labels, labels: Labels) -> float:
    """Share of ``predicted`` (int64 [n]) that equals ``labels`` (int64 [n], n > 0)."""
    return float(np.mean(predicted == labels, dtype=np.float64))


def macro_f1(predicted: Labels, labels: Labels) -> float:
    """Mean over classes of F1 = 2 TP / (2 TP + FP + FN).

    ``predicted`` and ``labels``: int64 [n], n > 0, at least 0. A class that neither of them has is
    left out of the mean; one that is never right counts as 0.
    """
    classes = int(max(predicted.max(), labels.max())) + 1
    hits = np.bincount(labels[predicted == labels], minlength=classes)
    either = np.bincount(predicted, minlength=classes) + np.bincount(labels, minlength=classes)
    present = either > 0
    return float(np.mean(2.0 * hits[present] / either[present]))


def roc_auc(scores: Floats, labels: Labels) -> float | None:
    """Area under the ROC curve: the chance that a positive scores above a negative.

    ``scores``: float [n], none of them NaN; ``labels``: int64 [n], 0 or 1. A tie counts one half:
    Mann and Whitney's U from mean ranks (Hanley and McNeil, Radiology 1982). None where one of the
    two classes is missing.
    """
    positives = int(np.count_nonzero(labels == 1))
    negatives = len(labels) - positives
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    midranks = last_rank - (counts - 1) / 2.0
    rank_sum = float(midranks[inverse][labels == 1].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)


def cross_entropies(logits: Floats, labels: Labels) -> Floats:
    """``-log softmax(logits)[label]``, float64 [n].

    ``logits``: float [n, C]; ``labels``: int64 [n].
    """
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    picked = rows[np.arange(len(rows)), labels]
    return np.asarray(np.log(np.exp(rows).sum(axis=1)) - picked)


def classification(
    logits: Floats, labels: Labels, nodes: Labels | None = None, *, chunk_rows: int = 65_536
) -> dict[str, float]:
    """``count``, ``loss``, ``accuracy``, ``macro_f1`` and, for two classes, ``roc_auc``.

    ``logits``: float [N, C]; ``labels``: int64 [n] in [0, C); ``nodes``: int64 [n], the rows of
    ``logits`` that they belong to, all in order if not given. What is not defined is left out: all
    but ``count`` for n = 0, ``roc_auc`` where one class is missing or a logit is NaN. Copies of at
    most ``chunk_rows`` rows are made at a time, which changes no bit of the result.
    """
    count = len(labels)
    if not count:
        return {"count": 0}
    predicted, losses = np.empty(count, np.int64), np.empty(count, np.float64)
    scores = np.empty(count, np.float64) if logits.shape[1] == 2 else None
    for begin in range(0, count, chunk_rows):
        part = slice(begin, begin + chunk_rows)
        rows = logits[part] if nodes is None else logits[nodes[part]]
        predicted[part] = np.argmax(rows, axis=1)
        losses[part] = cross_entropies(rows, labels[part])
        if scores is not None:
            scores[part] = rows[:, 1].astype(np.float64) - rows[:, 0]
    found: dict[str, float] = {
        "count": count,
        "loss": float(np.mean(losses)),
        "accuracy": accuracy(predicted, labels),
        "macro_f1": macro_f1(predicted, labels),
    }
    if scores is not None:
        area = None if np.isnan(scores).any() else roc_auc(scores, labels)
        if area is not None:
            found["roc_auc"] = area
    return found
