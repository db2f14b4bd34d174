"""Operators on a GPU: times, bytes, and ratios to cuSPARSE and PyTorch Geometric.

``moved_bytes`` is what the kernels of an operator ask for: every gathered row counts each time it
is read. Caches serve a part of that, so ``achieved``, its rate over that of a copy in the device's
memory, may exceed 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.bench import traffic
from dtrain.bench.contest import OURS, geometric_mean, installed, medians_ms
from dtrain.bench.graphs import patterns
from dtrain.errors import DtrainError
from dtrain.kernels.csr import Csr
from dtrain.kernels.dropout import dropout
from dtrain.kernels.edge_softmax import edge_softmax
from dtrain.kernels.gat import gat
from dtrain.kernels.maxk import maxk, spmm_maxk
from dtrain.kernels.sddmm import sddmm_dot
from dtrain.kernels.spmm import cusparse, spmm, spmm_max, spmm_mean

WIDTHS = (16, 64, 256)
LIMIT_S = 270.0
"""Seconds after which no further case is begun; the command takes at most five minutes."""

_HEADS, _HEAD_WIDTH, _K = 8, 8, 16
_COPY_BYTES = 1 << 30
_LARGEST_SCATTER = 1 << 33  # bytes of an edge-wise intermediate above which a peer is left out

Call = Callable[[], object]
Timed = Callable[[Call], float]


@dataclass(frozen=True)
class GpuRow:
    """One operator on one graph.

    ``ms``: median; ``achieved``: moved bytes a second over those of a copy; ``same_bits``: two
    calls gave equal results; ``ratios``: a peer's time over ours, above 1 where ours is faster.
    """

    op: str
    graph: str
    shape: str
    ms: float
    moved_bytes: int
    achieved: float
    same_bits: bool
    ratios: dict[str, float]


@dataclass(frozen=True)
class GpuReport:
    """All rows; geometric means of ratios by operator and peer; what time did not suffice for."""

    device: str
    torch_version: str
    copy_bytes_per_s: float
    rows: list[GpuRow]
    geomean: dict[str, float | None]
    left_out: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The report for a reader."""
        yield f"{self.device}, torch {self.torch_version}"
        yield f"copy within the device's memory: {self.copy_bytes_per_s / 1e9:.0f} GB/s"
        for row in self.rows:
            ratios = ", ".join(f"{ratio:.2f} x {peer}" for peer, ratio in row.ratios.items())
            bits = "" if row.same_bits else "  BITS DIFFER FROM RUN TO RUN"
            yield (
                f"{row.op:20} {row.graph:10} {row.shape:10} {row.ms:9.3f} ms "
                f"{row.moved_bytes / 1e6:9.1f} MB {row.achieved:6.2f} of copy  {ratios}{bits}"
            )
        for name, mean in self.geomean.items():
            yield f"{name:40} {mean}"
        for name in self.left_out:
            yield f"left out for want of time: {name}"


@dataclass(frozen=True)
class _Case:
    op: str
    shape: str
    moved_bytes: int
    contenders: dict[str, Call]


def bench_gpu(
    against: str,
    *,
    nodes: int,
    folder: Path | None,
    budget_s: float,
    only: str,
    say: Callable[[str], None],
    limit_s: float = LIMIT_S,
) -> GpuReport:
    """Measure the GPU's operators on every graph and width, in at most five minutes.

    Arguments as :func:`dtrain.bench.kernels.bench_kernels`.

    Raises:
        DtrainError: no GPU that torch can use, or an unknown peer in ``against``.
    """
    peers = installed(against)
    if not torch.cuda.is_available():
        raise DtrainError(
            "--device cuda: expected a GPU that torch can use, found none; run it where there is "
            "one, with a build of torch for it (dtrain env shows both)"
        )
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    return measure(device, name, _event_seconds, peers, nodes, folder, budget_s, only, say, limit_s)


def measure(
    device: torch.device,
    name: str,
    timed: Timed,
    peers: list[str],
    nodes: int,
    folder: Path | None,
    budget_s: float,
    only: str,
    say: Callable[[str], None],
    limit_s: float,
    copy_bytes: int = _COPY_BYTES,
) -> GpuReport:
    """:func:`bench_gpu` on any device, with ``timed`` to call something and give its seconds."""
    end = time.monotonic() + limit_s
    rate = _copy_rate(device, copy_bytes, budget_s, timed)
    rows: list[GpuRow] = []
    left_out: list[str] = []
    for graph, pattern in patterns(nodes, folder).items():
        for case in _cases(pattern.to(device), peers):
            label = f"{case.op} {graph} {case.shape}"
            if only not in label:
                continue
            if time.monotonic() > end:
                left_out.append(label)
                continue
            rows.append(_row(case, graph, rate, budget_s, timed))
            say(f"{label}: {rows[-1].ms} ms, {rows[-1].ratios}")
    return GpuReport(name, torch.__version__, rate, rows, _means(rows), left_out)


def _copy_rate(device: torch.device, copy_bytes: int, budget_s: float, timed: Timed) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    source = torch.zeros(copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    ms = medians_ms({OURS: lambda: target.copy_(source)}, budget_s, timed)[OURS]
    return 2 * copy_bytes / (ms / 1e3)


def _row(case: _Case, graph: str, rate: float, budget_s: float, timed: Timed) -> GpuRow:
    results = [_tensors(case.contenders[OURS]()) for _ in range(2)]
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    times = medians_ms(case.contenders, budget_s, timed)
    ms = times.pop(OURS)
    achieved = case.moved_bytes / (ms / 1e3) / rate
    ratios = {peer: round(theirs / ms, 2) for peer, theirs in times.items()}
    return GpuRow(
        case.op, graph, case.shape, round(ms, 4), case.moved_bytes, round(achieved, 3), same, ratios
    )


def _tensors(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]


def _event_seconds(call: Call) -> float:
    """Seconds between two events on the device, around what ``call`` puts into its stream."""
    event: Any = torch.cuda.Event
    begin, end = (event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _means(rows: list[GpuRow]) -> dict[str, float | None]:
    kinds = dict.fromkeys((row.op, peer) for row in rows for peer in row.ratios)
    return {
        f"{op} / {peer}": geometric_mean(
            row.ratios[peer] for row in rows if row.op == op and peer in row.ratios
        )
        for op, peer in kinds
    }


def _cases(csr: Csr, peers: list[str]) -> Iterator[_Case]:
    for width in WIDTHS:
        yield from _sums(csr, width, peers, torch.float32)
        yield from _extremes(csr, width, peers)
    yield from _sums(csr, 64, peers, torch.bfloat16)
    yield from _of_entries(csr, peers)
    yield _attention(csr, peers)
    yield _maxk(csr)


def _sums(csr: Csr, width: int, peers: list[str], dtype: torch.dtype) -> Iterator[_Case]:
    """Weighted sum and mean: forward alone, and with the gradient to the rows."""
    x, weight = _random(csr, csr.num_cols, width).to(dtype), _random(csr, csr.nnz).to(dtype)
    grad = _random(csr, csr.num_rows, width).to(dtype)
    transposed, shape = csr.transpose()[0], f"F={width}" + (" bf16" if x.itemsize == 2 else "")
    contenders: dict[str, Call] = {OURS: lambda: spmm(csr, x, weight)}
    both: dict[str, Call] = {OURS: _both(lambda leaf: spmm(csr, leaf, weight), x, grad)}
    if dtype == torch.float32:
        contenders["cusparse"] = lambda: cusparse.spmm(csr, x, weight)
        both["cusparse"] = lambda: (
            cusparse.spmm(csr, x, weight),
            cusparse.spmm(transposed, grad, csr.by_column(weight)),
        )
        if "pyg" in peers and csr.nnz * width * 4 < _LARGEST_SCATTER:
            theirs = _scatter(csr, "sum", weight)
            contenders["pyg: scatter"] = lambda: theirs(x)
            both["pyg: scatter"] = _both(theirs, x, grad)
    moved = traffic.sum_bytes(csr, width, x.itemsize, weighted=True)
    back = traffic.sum_bytes(transposed, width, x.itemsize, weighted=True)
    yield _Case("spmm sum fwd", shape, moved, contenders)
    yield _Case("spmm sum fwd+bwd", shape, moved + back, both)
    mean: dict[str, Call] = {OURS: lambda: spmm_mean(csr, x)}
    yield _Case(
        "spmm mean fwd", shape, traffic.sum_bytes(csr, width, x.itemsize, weighted=False), mean
    )


def _extremes(csr: Csr, width: int, peers: list[str]) -> Iterator[_Case]:
    x, grad = _random(csr, csr.num_cols, width), _random(csr, csr.num_rows, width)

    def ours(leaf: Tensor) -> Tensor:
        return spmm_max(csr, leaf)[0]

    contenders: dict[str, Call] = {OURS: _both(ours, x, grad)}
    if "pyg" in peers and csr.nnz * width * 4 < _LARGEST_SCATTER:
        contenders["pyg: scatter"] = _both(_scatter(csr, "max", None), x, grad)
    yield _Case("spmm max fwd+bwd", f"F={width}", traffic.maximum_bytes(csr, width), contenders)


def _of_entries(csr: Csr, peers: list[str]) -> Iterator[_Case]:
    """Operators whose result has a number for every entry."""
    x, y = _random(csr, csr.num_rows, 64), _random(csr, csr.num_cols, 64)
    scores, grad = _random(csr, csr.nnz, _HEADS), _random(csr, csr.nnz, _HEADS)
    yield _Case(
        "sddmm fwd", "F=64", traffic.sddmm_bytes(csr, 64), {OURS: lambda: sddmm_dot(csr, x, y)}
    )
    softmax: dict[str, Call] = {OURS: _both(lambda s: edge_softmax(csr, s), scores, grad)}
    if "pyg" in peers:
        from torch_geometric.utils import softmax as peer

        softmax["pyg: softmax"] = _both(lambda s: peer(s, ptr=csr.indptr), scores, grad)
    yield _Case("edge softmax fwd+bwd", "H=8", traffic.softmax_bytes(csr, _HEADS), softmax)
    drop: dict[str, Call] = {
        OURS: lambda: dropout(scores, 0.5, 7),
        "torch: dropout": lambda: torch.nn.functional.dropout(scores, 0.5),
    }
    yield _Case("dropout fwd", "H=8", 2 * scores.numel() * scores.itemsize, drop)


def _attention(csr: Csr, peers: list[str]) -> _Case:
    """The fused operator alone against the whole of PyG's layer after its linear map."""
    x = _random(csr, csr.num_cols, _HEADS, _HEAD_WIDTH)
    src, dst = _random(csr, csr.num_cols, _HEADS), _random(csr, csr.num_rows, _HEADS)
    inputs = [t.requires_grad_() for t in (x, src, dst)]
    grad = _random(csr, csr.num_rows, _HEADS, _HEAD_WIDTH)
    contenders: dict[str, Call] = {
        OURS: lambda: torch.autograd.grad(gat(csr, *inputs, p=0.5, key=7), inputs, grad)
    }
    if "pyg" in peers and csr.nnz * _HEADS * _HEAD_WIDTH * 16 < _LARGEST_SCATTER:
        from torch_geometric.nn import GATConv

        size = _HEADS * _HEAD_WIDTH
        conv = GATConv(size, _HEAD_WIDTH, heads=_HEADS, dropout=0.5, add_self_loops=False)
        conv = conv.to(csr.indices.device)
        edges = torch.stack([csr.indices, csr.row_of_entry()])
        rows = x.detach().flatten(1).requires_grad_()
        theirs = [rows, *conv.parameters()]
        contenders["pyg: GATConv"] = lambda: torch.autograd.grad(
            conv(rows, edges), theirs, grad.flatten(1)
        )
    moved = traffic.attention_bytes(csr, _HEADS, _HEAD_WIDTH)
    return _Case("gat fwd+bwd", f"{_HEADS}x{_HEAD_WIDTH}", moved, contenders)


def _maxk(csr: Csr) -> _Case:
    width = WIDTHS[-1]
    x, weight = _random(csr, csr.num_cols, width), _random(csr, csr.nnz)
    grad = _random(csr, csr.num_rows, width)
    contenders: dict[str, Call] = {
        OURS: _both(lambda leaf: spmm_maxk(csr, maxk(leaf, _K), weight), x, grad),
        "dense: dtrain's spmm": _both(lambda leaf: spmm(csr, leaf, weight), x, grad),
    }
    return _Case(
        "maxk fwd+bwd", f"F={width} k={_K}", traffic.maxk_bytes(csr, width, _K), contenders
    )


def _both(call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Call:
    """Forward and backward of a function of ``x``; gives its gradient."""
    leaf = x.detach().clone().requires_grad_()

    return lambda: torch.autograd.grad(call(leaf), leaf, grad)


def _scatter(csr: Csr, reduce: str, weight: Tensor | None) -> Callable[[Tensor], Tensor]:
    """PyG's way: a row for every entry, then a reduction by destinations."""
    from torch_geometric.utils import scatter

    rows = csr.row_of_entry()

    def run(x: Tensor) -> Tensor:
        entries = x[csr.indices] if weight is None else x[csr.indices] * weight[:, None]
        found: Tensor = scatter(entries, rows, 0, csr.num_rows, reduce)
        return found

    return run


def _random(csr: Csr, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        csr.indices.device
    )
