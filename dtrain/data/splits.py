"""Seeded train/val/test splits that depend on nothing but their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.graph import Split
from dtrain.errors import DtrainError
from dtrain.kernels.rng import derive_key, mix64_array

_SPLIT_TAG = 0x5B117


def random_split(
    labels: NDArray[np.int64], fractions: Sequence[float], seed: int, *, field: str
) -> Split:
    """Deal the labelled nodes to train, val and test in a random order.

    ``labels``: int64 [N], -1 where unlabelled; ``fractions``: three numbers in (0, 1) with a sum of
    at most 1; ``field`` is named in messages. The order is that of the draws of SplitMix64 for
    ``(seed, node)``.

    Raises:
        DtrainError: the fractions are wrong or leave a part empty.
    """
    ok = len(fractions) == 3 and all(0 < f < 1 for f in fractions) and sum(fractions) <= 1 + 1e-9
    if not ok:
        raise DtrainError(
            f"{field}: expected three fractions above 0 with a sum of at most 1 (train, val, "
            f"test), got {','.join(f'{f:g}' for f in fractions)}"
        )
    nodes = np.flatnonzero(labels >= 0)
    draws = mix64_array(derive_key(seed, _SPLIT_TAG), nodes.astype(np.uint64))
    shuffled = nodes[np.argsort(draws, kind="stable")]
    ends = np.rint(np.cumsum([0.0, *fractions]) * len(nodes)).astype(np.int64)
    parts = [np.sort(shuffled[lo:hi]) for lo, hi in itertools.pairwise(ends)]
    if any(len(part) == 0 for part in parts):
        raise DtrainError(
            f"{field}: expected at least one node in each part, got {[len(p) for p in parts]} of "
            f"{len(nodes)} labelled nodes; choose other fractions"
        )
    return Split(*parts)


def masks_to_splits(masks: dict[str, NDArray[Any]], num_nodes: int, where: str) -> list[Split]:
    """Splits from boolean masks ``train``, ``val`` and ``test``: each [N], [K, N] or [N, K].

    Raises:
        DtrainError: a mask that is missing or has another shape; ``where`` is named.
    """
    rows: dict[str, NDArray[np.bool_]] = {}
    for part in Split._fields:
        mask = masks.get(part)
        if mask is None:
            raise DtrainError(f"{where}: {part} mask: expected one, got none")
        mask = np.atleast_2d(np.asarray(mask)).astype(bool)
        if mask.shape[1] != num_nodes and mask.shape[0] == num_nodes:
            mask = mask.T
        if mask.ndim != 2 or mask.shape[1] != num_nodes:
            raise DtrainError(
                f"{where}: {part} mask: expected {num_nodes} flags a split, got shape "
                f"{list(np.shape(masks[part]))}"
            )
        rows[part] = mask
    counts = {len(mask) for mask in rows.values()}
    # A single test mask beside many train masks is the same test set for all of them.
    if len(counts - {1}) > 1:
        raise DtrainError(f"{where}: masks: expected as many of each part, got {sorted(counts)}")
    splits = []
    for k in range(max(counts)):
        parts = (rows[part][k if len(rows[part]) > 1 else 0] for part in Split._fields)
        splits.append(Split(*(np.flatnonzero(part) for part in parts)))
    return splits
