"""Operators of :mod:`dtrain.kernels` beside what torch and PyTorch Geometric offer for the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from dtrain.bench.contest import OURS, Row, compare, geometric_mean, installed
from dtrain.bench.graphs import patterns
from dtrain.bench.memory import peak_growth_bytes
from dtrain.bench.sparse_features import OP as SPARSE_STEP
from dtrain.bench.sparse_features import cora_step
from dtrain.kernels.csr import Csr
from dtrain.kernels.maxk import maxk, spmm_maxk
from dtrain.kernels.spmm import spmm, spmm_max_values, spmm_mean

WIDTHS = (16, 64, 256)
_SCATTER_BYTES = 1 << 28  # above it a peer that writes a row for every edge is left out

Call = Callable[[], object]


@dataclass(frozen=True)
class KernelReport:
    """``rows`` and geometric means of their ratios; memory in bytes above that of the inputs."""

    rows: list[Row]
    geomean: dict[str, float | None]
    gat_peak_bytes: dict[str, int]
    threads: int
    torch_version: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "rows": [row.as_json() for row in self.rows],
            "geomean": self.geomean,
            "gat_peak_bytes": self.gat_peak_bytes,
            "threads": self.threads,
            "torch": self.torch_version,
        }


def bench_kernels(
    against: str,
    *,
    threads: int,
    nodes: int,
    folder: Path | None,
    budget_s: float,
    only: str,
    say: Callable[[str], None],
) -> KernelReport:
    """Measure every operator on every graph and width.

    ``only``: part of the lines to measure (``op graph shape``), "" for all; ``budget_s``: seconds
    for each comparison; ``folder``: see :func:`dtrain.bench.graphs.patterns`.

    Raises:
        DtrainError: an unknown peer in ``against``.
    """
    peers = installed(against)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rows: list[Row] = []
    peaks: dict[str, int] = {}
    try:
        for graph, csr in patterns(nodes, folder).items():
            for case in _cases(csr, peers):
                if only in f"{case.op} {graph} {case.shape}":
                    rows += compare(case.op, graph, case.shape, case.contenders, budget_s)
                    say(f"{case.op} {graph} {case.shape}: {rows[-1].ratio} x {rows[-1].peer}")
            if not peaks and only in "gat fwd+bwd":
                layers = _gat_contenders(csr, peers)
                peaks = {name: peak_growth_bytes(call) for name, call in layers.items()}
        step = cora_step(folder, peers) if only in f"{SPARSE_STEP} cora" else {}
        if step:
            rows += compare(SPARSE_STEP, "cora", "1433-16-7", step, budget_s)
    finally:
        torch.set_num_threads(before)
    return KernelReport(rows, _means(rows, peaks), peaks, threads, torch.__version__)


@dataclass(frozen=True)
class _Case:
    op: str
    shape: str
    contenders: dict[str, Call]


def _cases(csr: Csr, peers: list[str]) -> Iterator[_Case]:
    for width in WIDTHS:
        x = _random(csr.num_cols, width)
        weight = _random(csr.nnz).abs()
        calls: dict[str, Callable[[Tensor], Tensor]] = {
            "spmm sum": partial(spmm, csr, weight=weight),
            "spmm mean": partial(spmm_mean, csr),
            "spmm max": partial(spmm_max_values, csr),
        }
        for backward in (False, True):
            suffix = "fwd+bwd" if backward else "fwd"
            for op, ours in calls.items():
                contenders = {OURS: _timed(ours, x, backward)}
                for name, call in _spmm_peers(csr, weight, op, peers, width).items():
                    contenders[name] = _timed(call, x, backward)
                yield _Case(f"{op} {suffix}", f"F={width}", contenders)
    yield _Case("gat fwd+bwd", "8x8", _gat_contenders(csr, peers))
    yield _maxk_case(csr)


def _timed(call: Callable[[Tensor], Tensor], x: Tensor, backward: bool) -> Call:
    """The forward pass, or both passes for a gradient that is made once."""
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return call(x)

        return forward
    leaf = x.clone().requires_grad_()
    grad = _random(*call(x).shape)
    return lambda: torch.autograd.grad(call(leaf), leaf, grad)


def _spmm_peers(
    csr: Csr, weight: Tensor, op: str, peers: list[str], width: int
) -> dict[str, Callable[[Tensor], Tensor]]:
    """What torch and PyG offer for ``op``; a way that torch refuses is left out."""
    reduce = op.removeprefix("spmm ")
    values = weight if reduce == "sum" else torch.ones(csr.nnz)
    shape = (csr.num_rows, csr.num_cols)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that sparse tensors are in beta
        wide = torch.sparse_csr_tensor(csr.indptr, csr.indices, values, shape)
        narrow = torch.sparse_csr_tensor(csr.indptr.int(), csr.indices.int(), values, shape)
    ways: dict[str, Callable[[Tensor], Tensor]] = {}
    if "torch" in peers:
        name = {"max": "amax"}.get(reduce, reduce)
        ways["torch: sparse.mm reduce"] = lambda x: torch.sparse.mm(wide, x, name)
        if reduce == "sum":
            ways["torch: csr int64"] = lambda x: wide @ x
            ways["torch: csr int32"] = lambda x: narrow @ x
            # No sparse product to its user, but the fastest way to one: a peer of its own.
            ways["embedding_bag: FBGEMM"] = lambda x: embedding_bag(
                csr.indices,
                x,
                csr.indptr,
                mode="sum",
                per_sample_weights=weight,
                include_last_offset=True,
            )
    if "pyg" in peers:
        from torch_geometric.utils import scatter
        from torch_geometric.utils import spmm as pyg_spmm

        ways["pyg: spmm"] = lambda x: pyg_spmm(wide, x, reduce)
        if csr.nnz * width * 4 <= _SCATTER_BYTES:
            rows = csr.row_of_entry()

            def by_scatter(x: Tensor) -> Tensor:
                entries = x[csr.indices]
                if reduce == "sum":
                    entries = entries * weight[:, None]
                found: Tensor = scatter(entries, rows, 0, csr.num_rows, reduce)
                return found

            ways["pyg: scatter"] = by_scatter
    return ways


def _maxk_case(csr: Csr) -> _Case:
    """MaxK and its product, beside the product of the dense rows, both passes."""
    width, k = WIDTHS[-1], 16
    x, weight = _random(csr.num_cols, width).requires_grad_(), _random(csr.nnz).abs()
    grad = _random(csr.num_rows, width)
    contenders: dict[str, Call] = {
        OURS: lambda: torch.autograd.grad(spmm_maxk(csr, maxk(x, k), weight), x, grad),
        "dense: dtrain's spmm": lambda: torch.autograd.grad(spmm(csr, x, weight), x, grad),
    }
    return _Case("maxk fwd+bwd", f"F={width} k={k}", contenders)


def _gat_contenders(csr: Csr, peers: list[str]) -> dict[str, Call]:
    """A layer of 8 heads of width 8 on 64 columns, forward and backward to all parameters."""
    from dtrain.data.block import Block
    from dtrain.models.gat import GatLayer
    from dtrain.models.layer import LayerContext

    x = _random(csr.num_cols, 64).requires_grad_()
    grad = _random(csr.num_rows, 64)
    block = Block(csr, csr.row_counts())
    layer = GatLayer(64, 8, 8, p=0.0, attention_p=0.0)
    inputs = [x, *layer.parameters()]
    context = LayerContext(0, True)
    contenders: dict[str, Call] = {
        OURS: lambda: torch.autograd.grad(layer(block, x, context), inputs, grad)
    }
    if "pyg" in peers:
        from torch_geometric.nn import GATConv

        conv = GATConv(64, 8, heads=8)
        edges = torch.stack([csr.indices, csr.row_of_entry()])
        theirs = [x, *conv.parameters()]
        contenders["pyg: GATConv"] = lambda: torch.autograd.grad(conv(x, edges), theirs, grad)
    return contenders


def _means(rows: list[Row], peaks: dict[str, int]) -> dict[str, float | None]:
    def mean(op: str, peer: str) -> float | None:
        return geometric_mean(r.ratio for r in rows if r.op == op and r.peer.startswith(peer))

    memory = None
    if peaks.get("pyg: GATConv"):
        memory = round(peaks[OURS] / peaks["pyg: GATConv"], 3)
    return {
        "spmm_fwd_vs_torch": mean("spmm sum fwd", "torch"),
        "spmm_fwd_bwd_vs_torch": mean("spmm sum fwd+bwd", "torch"),
        "spmm_fwd_vs_embedding_bag": mean("spmm sum fwd", "embedding_bag"),
        "spmm_fwd_bwd_vs_embedding_bag": mean("spmm sum fwd+bwd", "embedding_bag"),
        "spmm_max_vs_pyg": mean("spmm max fwd", "pyg"),
        "spmm_max_fwd_bwd_vs_pyg": mean("spmm max fwd+bwd", "pyg"),
        "gat_fwd_bwd_vs_pyg": mean("gat fwd+bwd", "pyg"),
        "gat_memory_vs_pyg": memory,
        "maxk_vs_dense": mean("maxk fwd+bwd", "dense"),
        "sparse_gcn_step_vs_pyg": mean(SPARSE_STEP, "pyg"),
    }


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
