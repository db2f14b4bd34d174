"""Generated graphs: a degree-corrected planted partition with informative features.

Every random decision is a draw of a counter-based generator, and weights and sums are integers, so
the same arguments give the same graph with any number of threads and on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from dtrain.data.csr_build import build_csr
from dtrain.data.graph import GraphArrays
from dtrain.data.splits import random_split
from dtrain.errors import DtrainError
from dtrain.kernels.rng import derive_key, mix64_array, mix64_jit

_LABEL, _WEIGHT, _EDGE, _CENTER, _NOISE = range(1, 6)
_WEIGHT_UNIT = 1 << 12
_EXPONENT = 2.5
_TRIES = 8


@dataclass(frozen=True)
class SynthSpec:
    """What to generate.

    ``avg_degree``: mean number of neighbours; ``homophily``: expected fraction of edges between
    nodes of one class; ``signal``: distance of a class's mean feature vector from the origin, in
    standard deviations of the noise in one feature.
    """

    nodes: int
    avg_degree: float = 15.0
    classes: int = 10
    features: int = 64
    homophily: float = 0.7
    seed: int = 0
    signal: float = 1.0
    feature_dtype: str = "float32"
    train_fraction: float = 0.6
    val_fraction: float = 0.2
    test_fraction: float | None = None

    def check(self) -> None:
        """Raise DtrainError for the first option that is out of range."""
        limits: list[tuple[str, float, float, float]] = [
            ("nodes", self.nodes, 2, 2**31 - 1),
            ("classes", self.classes, 2, self.nodes),
            ("features", self.features, 1, 2**20),
            ("homophily", self.homophily, 0, 1),
            ("avg-degree", self.avg_degree, 0, (self.nodes - 1) / 2),
            ("signal", self.signal, 0, 1e6),
            ("seed", self.seed, 0, 2**63 - 1),
        ]
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise DtrainError(f"--{name}: expected {low} to {high:g}, got {value}")
        if self.feature_dtype not in ("float32", "float16"):
            raise DtrainError(
                f"--feature-dtype: expected float32 or float16, got {self.feature_dtype}"
            )

    def describe(self) -> str:
        """One line for the store's ``source``."""
        return (
            f"synth nodes={self.nodes} avg_degree={self.avg_degree:g} classes={self.classes} "
            f"features={self.features} homophily={self.homophily:g} signal={self.signal:g} "
            f"seed={self.seed}"
        )


def synthesize(spec: SynthSpec, threads: int | None = None) -> GraphArrays:
    """Generate the graph of ``spec``; undirected, without self loops or duplicates.

    The model is the degree-corrected stochastic block model (Karrer and Newman, Phys. Rev. E 83,
    2011) with expected degrees of a power law (exponent 2.5, cut off where one edge between two
    hubs would be expected twice). The features of a node are its class's mean plus noise; they are
    made when they are asked for, never all at once. ``threads`` only decides how long it takes.

    Raises:
        DtrainError: an option of ``spec`` is out of range.
    """
    spec.check()
    pool_size = threads or os.cpu_count() or 1
    nodes = np.arange(spec.nodes, dtype=np.uint64)
    draws = mix64_array(derive_key(spec.seed, _LABEL), nodes)
    labels = (draws % np.uint64(spec.classes)).astype(np.int64)
    # Every class has a member, however small the graph.
    labels[: spec.classes] = np.arange(spec.classes)
    train, val = spec.train_fraction, spec.val_fraction
    test = 1 - train - val if spec.test_fraction is None else spec.test_fraction
    split = random_split(
        labels,
        (train, val, test),
        spec.seed,
        field="--train-fraction, --val-fraction, --test-fraction",
    )
    with ThreadPoolExecutor(pool_size) as pool:
        src, dst = _draw_edges(spec, labels, pool)
    indptr, indices = build_csr(spec.nodes, src, dst, undirected=True)
    return GraphArrays(
        indptr,
        indices,
        ClassFeatures(spec, labels, pool_size),
        labels,
        spec.classes,
        splits=[split],
        source=spec.describe(),
    )


class ClassFeatures:
    """Features that are computed from the node's number when asked for.

    ``x[v, f] = center[label(v), f] + noise``, where ``center`` has length ``signal`` and the noise
    is the standardised sum of four uniform draws (mean 0, deviation 1).
    """

    checked = True

    def __init__(self, spec: SynthSpec, labels: NDArray[np.int64], threads: int) -> None:
        self.num_features = spec.features
        self.dtype = np.dtype(spec.feature_dtype)
        self._labels, self._threads = labels, threads
        self._key = np.uint64(derive_key(spec.seed, _NOISE))
        centers = np.empty((spec.classes, spec.features), dtype=np.float32)
        ids = np.arange(spec.classes, dtype=np.int64)
        zero = np.zeros_like(centers)
        _fill_noise(np.uint64(derive_key(spec.seed, _CENTER)), ids, ids, zero, centers)
        # One row after another in exact order: a vectorised sum may differ between machines.
        for row in centers:
            length = sum(float(value) ** 2 for value in row) ** 0.5
            row *= np.float32(spec.signal / length) if length else np.float32(0)
        self._centers = centers

    def rows(self, nodes: NDArray[np.int64]) -> NDArray[Any]:
        """Features of ``nodes`` (int64 [n]): [n, num_features] of ``dtype``."""
        out = np.empty((len(nodes), self.num_features), dtype=np.float32)

        def fill(lo: int, hi: int) -> None:
            ids = nodes[lo:hi]
            _fill_noise(self._key, ids, self._labels[ids], self._centers, out[lo:hi])

        with ThreadPoolExecutor(self._threads) as pool:
            _in_ranges(pool, fill, len(nodes), max(1, len(nodes) // (2 * self._threads) + 1))
        return out if self.dtype == np.float32 else out.astype(self.dtype)


def _draw_edges(
    spec: SynthSpec, labels: NDArray[np.int64], pool: ThreadPoolExecutor
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """One end of every edge belongs to a node by its weight, the other is drawn by weight."""
    target = max(1, round(spec.nodes * spec.avg_degree / 2)) if spec.avg_degree else 0
    order = np.argsort(labels, kind="stable").astype(np.int32)
    weights = _weights(spec)
    ends = np.cumsum(weights[order])
    counts = np.bincount(labels, minlength=spec.classes)
    class_ends = ends[np.cumsum(counts) - 1]
    class_starts = np.concatenate([[0], class_ends[:-1]])
    total = int(ends[-1])
    # A guide table: where to start looking for a number among ``ends`` (Chen and Asau, 1974).
    step = max(1, total // spec.nodes)
    guide = np.searchsorted(ends, np.arange(0, total, step), side="right").astype(np.int32)
    # Node v gives floor(target * (weight up to v) / total) - floor(... before v) edges.
    shares = np.cumsum(weights).astype(np.float64) * (target / total)
    first = np.concatenate([[0], np.floor(shares).astype(np.int64)])
    first[-1] = target
    src, dst = np.empty(target, dtype=np.int32), np.empty(target, dtype=np.int32)
    threshold = np.uint64(min(int(spec.homophily * 2**53), 2**53))
    key = np.uint64(derive_key(spec.seed, _EDGE))

    def draw(lo: int, hi: int) -> None:
        _draw_range(
            lo, hi, key, threshold, labels, order, ends, guide, step,
            class_starts, class_ends, first, src, dst,
        )  # fmt: skip

    _in_ranges(pool, draw, spec.nodes, 1 << 16)
    return src, dst


def _weights(spec: SynthSpec) -> NDArray[np.int64]:
    """int64 [N]: expected degrees up to a factor, as whole numbers (exact sums on any machine)."""
    draws = mix64_array(derive_key(spec.seed, _WEIGHT), np.arange(spec.nodes, dtype=np.uint64))
    uniform = ((draws >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    # The mean of this power law is 3 times its minimum.
    cutoff = max(1.0, 3.0 * (spec.nodes / max(spec.avg_degree, 1.0)) ** 0.5)
    heavy = np.minimum(uniform ** (-1.0 / (_EXPONENT - 1.0)), cutoff)
    return np.asarray(np.rint(heavy * _WEIGHT_UNIT).astype(np.int64))


def _in_ranges(
    pool: ThreadPoolExecutor, work: Callable[[int, int], None], size: int, step: int
) -> None:
    """Call ``work(lo, hi)`` for ranges that cover ``size``; the compiled work runs in parallel."""
    bounds = [(lo, min(lo + step, size)) for lo in range(0, size, step)]
    for future in [pool.submit(work, lo, hi) for lo, hi in bounds]:
        future.result()


@numba.njit(nogil=True, cache=True)
def _draw_range(
    lo: Any, hi: Any, key: Any, threshold: Any, labels: Any, order: Any, ends: Any, guide: Any,
    step: Any, class_starts: Any, class_ends: Any, first: Any, src: Any, dst: Any,
) -> None:  # fmt: skip
    total = ends[len(ends) - 1]
    for u in range(lo, hi):
        start, stop = class_starts[labels[u]], class_ends[labels[u]]
        inside = stop - start
        for edge in range(first[u], first[u + 1]):
            v = np.int64(u)
            for attempt in range(_TRIES):
                counter = np.uint64(edge) * np.uint64(2 * _TRIES) + np.uint64(2 * attempt)
                within = (mix64_jit(key, counter) >> np.uint64(11)) < threshold
                draw = mix64_jit(key, counter + np.uint64(1))
                if within or inside == total:
                    r = start + np.int64(draw % np.uint64(inside))
                else:
                    r = np.int64(draw % np.uint64(total - inside))
                    if r >= start:
                        r += inside
                k = np.int64(guide[r // step])
                while ends[k] <= r:
                    k += 1
                v = np.int64(order[k])
                if v != u:
                    break
            src[edge] = u
            dst[edge] = v


@numba.njit(nogil=True, cache=True)
def _fill_noise(key: Any, nodes: Any, labels: Any, centers: Any, out: Any) -> None:
    width = out.shape[1]
    # Sum of four uniform 16-bit numbers: mean 131070, variance 4 * (2**32 - 1) / 12.
    scale = 1.0 / np.sqrt((2.0**32 - 1.0) / 3.0)
    low = np.uint64(0xFFFF)
    for i in range(len(nodes)):
        base = np.uint64(nodes[i]) * np.uint64(width)
        for f in range(width):
            draw = mix64_jit(key, base + np.uint64(f))
            total = np.float64(
                (draw & low)
                + ((draw >> np.uint64(16)) & low)
                + ((draw >> np.uint64(32)) & low)
                + (draw >> np.uint64(48))
            )
            out[i, f] = centers[labels[i], f] + (total - 131070.0) * scale
