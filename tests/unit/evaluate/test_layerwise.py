"""Layer-wise inference: equal to one pass over the whole graph, within its limits."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dtrain.config import ModelConfig
from dtrain.data.sample.neighbor import Adjacency, SlotPool, sample_block
from dtrain.data.store import GraphStore
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError
from dtrain.evaluate import Limits, chunks, evaluate, layerwise_logits
from dtrain.kernels import results
from dtrain.models.build import build_layers
from dtrain.models.layer import LayerContext

LIMIT = 20_000_000
MODELS = {
    "gcn": ModelConfig(name="gcn", layers=3, hidden=8, residual=True),
    "sage": ModelConfig(name="sage", layers=2, hidden=16, norm="layer"),
    "sage max": ModelConfig(name="sage", layers=2, hidden=16, aggregator="max"),
    "gat": ModelConfig(name="gat", layers=2, hidden=4, heads=2),
}


class Sum(nn.Module):
    """Adds a node's in-neighbours to it and counts them, for as many layers as there are."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.seen: list[tuple[int, int, int]] = []

    def forward(self, block, state, ctx):
        assert not self.training
        assert not ctx.training
        assert torch.is_inference_mode_enabled()
        self.seen.append((block.num_dst, block.num_src, block.nnz))
        x, count = state if isinstance(state, tuple) else (state, torch.zeros(block.num_src))
        rows, columns = block.csr.row_of_entry(), block.csr.indices
        added = x[: block.num_dst].index_add(0, rows, x[columns])
        count = count[: block.num_dst] + block.csr.row_counts()
        return torch.cat([added / 4, count[:, None]], 1) if self.last else (added / 4, count)


class Wrong(nn.Module):
    """Returns rows of a shape that does not fit."""

    def __init__(self, rows: int | None, dims: int = 2) -> None:
        super().__init__()
        self.rows, self.dims, self.calls = rows, dims, 0

    def forward(self, block, state, ctx):
        self.calls += 1
        rows = block.num_dst if self.calls == 1 or self.rows is None else self.rows
        return torch.zeros((rows,) + (2,) * (self.dims - 1))


def direct(layers, store) -> np.ndarray:
    """One pass with all nodes as every layer's destinations."""
    graph = Adjacency.of(store.indptr, store.indices)
    nodes = np.arange(store.num_nodes)
    block, _ = sample_block(graph, SlotPool(len(nodes)), nodes, fanout=-1, replace=False, key=0)
    state = store.gather_features(nodes)
    with torch.inference_mode():
        for layer in layers:
            state = layer.eval()(block, state, LayerContext(0, False))
    return state.numpy()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "limits",
    [
        {"chunk_nodes": 1000},
        {"chunk_nodes": 7, "max_edges": 20},
        {"chunk_nodes": 50, "memory_bytes": 2000},
    ],
)
def test_equals_one_pass_over_the_graph(make_store, tmp_path, model, limits, sparse):
    store = make_store(sparse=sparse)
    layers = build_layers(MODELS[model], store.meta.num_features, store.meta.num_classes, seed=1)
    logits = layerwise_logits(layers, store, workdir=tmp_path, **limits)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, direct(layers, store), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "edges", "memory_bytes"), [(16, 30, 9000), (64, 1000, 6000), (20, 1000, 1 << 30)]
)
def test_tuples_pass_between_layers_and_limits_hold(
    make_store, tmp_path, nodes, edges, memory_bytes
):
    store = make_store()
    layers = [Sum(False), Sum(False), Sum(True)]
    before = set(os.listdir("/proc/self/fd"))
    logits = layerwise_logits(
        layers,
        store,
        chunk_nodes=nodes,
        max_edges=edges,
        memory_bytes=memory_bytes,
        workdir=tmp_path,
    )
    dense = np.eye(store.num_nodes)
    for v, (a, b) in enumerate(pairwise(store.indptr)):
        np.add.at(dense[v], store.indices[a:b], 1)
    x = store.gather_features(np.arange(store.num_nodes)).numpy().astype(np.float64)
    for _ in layers:
        x = dense @ x / 4
    np.testing.assert_allclose(logits[:, :-1], x, rtol=1e-4, atol=1e-4)
    assert np.array_equal(logits[:, -1], 3 * store.in_degree())
    for layer, row_bytes in zip(layers, (40, 44, 44), strict=True):
        assert sum(num_dst for num_dst, _, _ in layer.seen) == store.num_nodes
        assert max(num_dst for num_dst, _, _ in layer.seen) <= nodes
        for num_dst, num_src, nnz in layer.seen:
            assert num_dst == 1 or (nnz <= edges and 2 * num_src * row_bytes <= memory_bytes)
    assert os.listdir(tmp_path) == ["store"]
    del logits
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("memory_bytes", [100, 1 << 30])
def test_a_failure_leaves_nothing_behind(make_store, tmp_path, memory_bytes):
    store = make_store()
    layers = [Sum(False).train(), nn.Sequential(nn.Dropout()).train()]
    layers[1][0].eval()
    with pytest.raises(TypeError):
        layerwise_logits(layers, store, chunk_nodes=16, memory_bytes=memory_bytes, workdir=tmp_path)
    assert os.listdir(tmp_path) == ["store"]
    assert [layers[0].training, layers[1].training, layers[1][0].training] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("memory_bytes", [100, 1 << 30])
def test_layers_get_the_types_they_return(make_store, tmp_path, dtype, memory_bytes):
    class Cast(nn.Module):
        def __init__(self, wanted: torch.dtype) -> None:
            super().__init__()
            self.wanted = wanted

        def forward(self, block, state, ctx):
            assert state.dtype == self.wanted
            return state[: block.num_dst].to(dtype)

    store = make_store()
    logits = layerwise_logits(
        [Cast(torch.float32), Cast(dtype)],
        store,
        chunk_nodes=16,
        memory_bytes=memory_bytes,
        workdir=tmp_path,
    )
    wanted = store.gather_features(np.arange(store.num_nodes)).to(dtype).float()
    assert logits.dtype == np.float32
    assert np.array_equal(logits, wanted.numpy())


@pytest.mark.parametrize("layer", [Wrong(1), Wrong(None, dims=1), Wrong(None, dims=3)])
def test_wrong_shapes_are_refused(make_store, tmp_path, layer):
    with pytest.raises(DtrainError, match=r"^model: expected"):
        layerwise_logits([layer], make_store(), chunk_nodes=16, workdir=tmp_path)


def test_no_room_for_hidden_rows_is_said(make_store, tmp_path, monkeypatch):
    store = make_store()
    limits = {"chunk_nodes": 16, "memory_bytes": 100}
    with pytest.raises(DtrainError, match="nowhere: expected room for 5280 bytes"):
        layerwise_logits([Sum(True)], store, workdir=tmp_path / "nowhere", **limits)

    def full(fd: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DtrainError, match="No space left"):
        layerwise_logits([Sum(True)], store, workdir=tmp_path, **limits)


def test_chunks_keep_to_partitions_and_limits():
    degrees = np.array([1, 2, 50, 0, 0, 3, 3, 3, 0, 9, 9, 1])
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    found = list(chunks(indptr, [0, 5, 5, 9, 12], Limits(nodes=3, edges=9)))
    assert found == [(0, 2), (2, 3), (3, 5), (5, 8), (8, 9), (9, 10), (10, 11), (11, 12)]


def test_evaluate_reports_every_split(make_store, tmp_path):
    class Perfect(nn.Module):
        def forward(self, block, state, ctx):
            self.turn = getattr(self, "turn", 0)
            labels = torch.tensor(store.labels[self.turn : self.turn + block.num_dst])
            self.turn += block.num_dst
            return nn.functional.one_hot(labels, 2).float() * 100

    store = make_store(classes=2)
    found = evaluate([Perfect()], store, 0, chunk_nodes=16, workdir=tmp_path)
    assert {name: values["count"] for name, values in found.items()} == {
        "train": 60,
        "val": 30,
        "test": 30,
    }
    for values in found.values():
        assert values["accuracy"] == values["macro_f1"] == values["roc_auc"] == 1
        assert values["loss"] < 1e-6


class _Peak:
    """The most memory of this process that is no file's, looked at all the time."""

    def __enter__(self) -> _Peak:
        self.before = self.most = self._now()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.0005):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize(
    ("model", "features", "hidden", "degree"),
    [("sage", 600, 8, 6), ("gat", 4, 600, 6), ("gcn", 16, 16, 60)],
)
def test_what_inference_takes_stays_within_the_memory(
    tmp_path, monkeypatch, model, features, hidden, degree
):
    spec = SynthSpec(nodes=15_000, avg_degree=degree, classes=3, features=features, seed=0)
    write_store(str(tmp_path / "store"), synthesize(spec), partitions=2, partitioner="range")
    store = GraphStore.open(str(tmp_path / "store"))
    layers = build_layers(ModelConfig(name=model, layers=3, hidden=hidden, heads=1), features, 3, 1)
    # As in a process whose memory is limited.
    monkeypatch.setattr(results._kept(), "most", 0)
    results.release()

    def evaluated(memory_bytes: int) -> tuple[int, float]:
        gc.collect()
        # What the C library keeps of freed memory would hide what is taken.
        ctypes.CDLL(None).malloc_trim(0)
        with _Peak() as peak:
            found = evaluate(
                layers, store, 0, chunk_nodes=65_536, workdir=tmp_path, memory_bytes=memory_bytes
            )
        return peak.most - peak.before, found["test"]["accuracy"]

    evaluated(LIMIT // 2)  # compiles
    tight, accuracy = evaluated(LIMIT)
    assert tight <= LIMIT
    roomy, the_same = evaluated(1 << 32)
    assert roomy > LIMIT
    assert accuracy == pytest.approx(the_same, abs=1e-3)
