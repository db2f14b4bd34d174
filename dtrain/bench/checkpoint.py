"""What a checkpoint costs: beside a memory copy, ``torch.save`` and DCP's own saves and loads."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save

from dtrain.bench.snapshots import WORKERS, SnapshotCost, snapshot_cost
from dtrain.checkpoint import CheckpointStore, Retention
from dtrain.config import ModelConfig
from dtrain.data.block import Block
from dtrain.errors import DtrainError
from dtrain.kernels.csr import Csr
from dtrain.models.build import build_layers
from dtrain.models.layer import LayerContext

_LARGE_BYTES = 4 << 20
_SMALL_TENSORS = 200
_SMALL_ELEMENTS = 256
_IDLE_S = 0.6


@dataclass(frozen=True)
class Report:
    """Ratios of medians, and the medians themselves.

    ``stall_vs_memcpy``, ``stall_vs_dcp_async``: time for which a background save keeps the
    training thread, over that of copying the state into warm buffers and over the stall of DCP's
    ``async_save``. ``slowdown_vs_dcp_async``: share of the training speed that is lost while a
    save runs in the background, over the same with DCP. ``save_vs_torch_save``: throughput of a
    whole save (copy, write, checksums, sync, commit) over that of ``torch.save`` with sync; to
    remove the older checkpoint, which follows in the background, is ``prune`` of ``seconds``.
    ``load_vs_dcp``: time to load over DCP's. ``snapshot_overhead_pct``: what a snapshot to a peer
    adds to a step, in percent of it (``snapshot``: how it was measured); None if left out.
    ``seconds``, ``slowdown``: medians behind the ratios; ``spread``: smallest and largest sample.
    """

    state_bytes: int
    tensors: int
    repeats: int
    threads: int
    cpus: int
    torch_version: str
    stall_vs_memcpy: float
    stall_vs_dcp_async: float
    slowdown_vs_dcp_async: float
    save_vs_torch_save: float
    load_vs_dcp: float
    snapshot_overhead_pct: float | None
    snapshot: dict[str, Any]
    seconds: dict[str, float]
    slowdown: dict[str, float]
    spread: dict[str, tuple[float, float]]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass
class _Samples:
    """Measurements by name; each repetition adds one to every name."""

    taken: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.taken.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.taken[name])


def run(
    megabytes: int,
    repeats: int,
    threads: int,
    folder: Path | None,
    say: Callable[[str], None],
    *,
    snapshot_pairs: int = 0,
    graph: str | None = None,
) -> Report:
    """Measure, each thing once in every repetition, so that a busy machine slows all alike.

    Args:
        megabytes: size of the state (10^6 bytes).
        repeats: repetitions after one that warms up.
        threads: torch's threads.
        folder: on the disk to measure; a temporary one by default. Emptied again.
        say: told of the progress.
        snapshot_pairs: pairs of steps with and without a snapshot; 0 leaves them out.
        graph: the store to train on for them; None for a generated graph.

    Raises:
        DtrainError: a number is too small, or the folder cannot be written.
    """
    if snapshot_pairs < 0:
        raise DtrainError(f"--snapshot-pairs: expected at least 0, got {snapshot_pairs}")
    for name, value in (("--megabytes", megabytes), ("--repeats", repeats), ("--threads", threads)):
        if value < 1:
            raise DtrainError(f"{name}: expected at least 1, got {value}")
    state = _state(megabytes * 1_000_000)
    samples = _Samples()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _workplace(folder) as place, _quiet():
            bench = _Bench(state, place)
            for number in range(repeats + 1):
                say("warming up" if not number else f"repetition {number} of {repeats}")
                bench.repetition(samples if number else _Samples(), number)
    finally:
        torch.set_num_threads(before)
    cost = None
    if snapshot_pairs:
        say(f"a job of {WORKERS} workers with snapshots in peer memory")
        with _workplace(folder) as place:
            cost = snapshot_cost(place, graph, snapshot_pairs, 0)
    return _report(state, samples, repeats, threads, cost)


def _report(
    state: Mapping[str, Tensor],
    samples: _Samples,
    repeats: int,
    threads: int,
    cost: SnapshotCost | None,
) -> Report:
    median = samples.median
    lost = {name: median(f"slowdown_{name}") for name in ("ours", "dcp_async")}
    return Report(
        state_bytes=sum(tensor.nbytes for tensor in state.values()),
        tensors=len(state),
        repeats=repeats,
        threads=threads,
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        torch_version=torch.__version__,
        stall_vs_memcpy=median("stall") / median("memcpy"),
        stall_vs_dcp_async=median("stall") / median("dcp_async_stall"),
        slowdown_vs_dcp_async=lost["ours"] / lost["dcp_async"] if lost["dcp_async"] > 0 else 1.0,
        save_vs_torch_save=median("torch_save") / median("save"),
        load_vs_dcp=median("load") / median("dcp_load"),
        snapshot_overhead_pct=None if cost is None else cost.overhead_pct,
        snapshot={} if cost is None else {**asdict(cost), "workers": WORKERS},
        seconds={n: median(n) for n in samples.taken if not n.startswith("slowdown")},
        slowdown=lost,
        spread={name: (min(taken), max(taken)) for name, taken in samples.taken.items()},
    )


class _Bench:
    """The state, its warm copies, and the folder to save to."""

    def __init__(self, state: dict[str, Tensor], place: Path) -> None:
        self.state = state
        self.place = place
        self.copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self.store = CheckpointStore(str(place / "ours"))
        self.training = _Training()

    def repetition(self, samples: _Samples, number: int) -> None:
        """Measure everything once; the order turns, so that nothing always comes after the same."""
        parts = [self._memcpy, self._ours, self._torch_save, self._dcp_async, self._slowdown]
        turn = number % len(parts)
        for part in parts[turn:] + parts[:turn]:
            part(samples, number)
        self._loads(samples, number)
        for left in self.place.iterdir():
            if left.name != "ours":
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        _settle()

    def _memcpy(self, samples: _Samples, number: int) -> None:
        began = time.perf_counter()
        for name, tensor in self.state.items():
            self.copies[name].copy_(tensor)
        samples.add("memcpy", time.perf_counter() - began)

    def _ours(self, samples: _Samples, number: int) -> None:
        began = time.perf_counter()
        pending = self.store.save_async(2 * number, self.state, {}, retention=Retention(1))
        pending.result()
        samples.add("save", pending.committed_s)
        samples.add("prune", time.perf_counter() - began - pending.committed_s)
        samples.add("stall", pending.stall_s)
        _settle()

    def _torch_save(self, samples: _Samples, number: int) -> None:
        began = time.perf_counter()
        with open(self.place / "torch_save", "wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())
        samples.add("torch_save", time.perf_counter() - began)
        _settle()

    def _dcp_async(self, samples: _Samples, number: int) -> None:
        began = time.perf_counter()
        wait = _begin_dcp(self.state, self.place / "dcp")
        samples.add("dcp_async_stall", time.perf_counter() - began)
        wait()
        samples.add("dcp_async_save", time.perf_counter() - began)
        _settle()

    def _slowdown(self, samples: _Samples, number: int) -> None:
        """Training speed while a save runs, beside that just before."""

        def ours() -> tuple[Callable[[], bool], Callable[[], Any]]:
            pending = self.store.save_async(2 * number + 1, self.state, {}, retention=Retention(1))
            return pending.done, pending.result

        def theirs() -> tuple[Callable[[], bool], Callable[[], Any]]:
            future = _dcp_future(self.state, self.place / "dcp-slowdown")
            return future.done, future.result

        both = [("ours", ours), ("dcp_async", theirs)]
        for name, begin in both if number % 2 else both[::-1]:
            idle = self.training.speed(_for(_IDLE_S))
            done, result = begin()
            busy = self.training.speed(done)
            result()
            samples.add(f"slowdown_{name}", max(0.0, 1 - busy / idle))
            _settle()

    def _loads(self, samples: _Samples, number: int) -> None:
        info = self.store.list()[-1]
        targets = self.copies

        def ours() -> None:
            self.store.load_into(info, targets)

        def theirs() -> None:
            dcp_load(targets, checkpoint_id=self.place / "dcp", no_dist=True)

        both = [("load", ours), ("dcp_load", theirs)]
        for name, load in both if number % 2 else both[::-1]:
            began = time.perf_counter()
            load()
            samples.add(name, time.perf_counter() - began)
        began = time.perf_counter()
        assert not self.store.verify(info)
        samples.add("verify", time.perf_counter() - began)


class _Training:
    """Steps of a small GraphSAGE on a random graph, as a run's training thread takes them."""

    nodes, degree, features, classes = 4000, 10, 32, 4

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(self.nodes, self.features, generator=g)
        self.labels = torch.randint(0, self.classes, (self.nodes,), generator=g)
        sources = torch.randint(0, self.nodes, (self.nodes * self.degree,), generator=g)
        indptr = torch.arange(0, self.nodes * self.degree + 1, self.degree)
        self.block = Block(Csr(indptr, sources, self.nodes), indptr.diff())
        config = ModelConfig(name="sage", hidden=64)
        self.layers = nn.ModuleList(build_layers(config, self.features, self.classes, 0))
        self.optimizer = torch.optim.Adam(self.layers.parameters())
        self.speed(_for(_IDLE_S))

    def speed(self, over: Callable[[], bool]) -> float:
        """Steps per second until ``over()``; at least one step."""
        began, steps = time.perf_counter(), 0
        while not steps or not over():
            self._step()
            steps += 1
        return steps / (time.perf_counter() - began)

    def _step(self) -> None:
        rows = self.x
        for layer in self.layers:
            rows = layer(self.block, rows, LayerContext(1, training=True))
        loss = nn.functional.cross_entropy(rows, self.labels)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()


def _state(size: int) -> dict[str, Tensor]:
    """Tensors as of a model and its Adam: many small ones, and large ones up to the size."""
    g = torch.Generator().manual_seed(0)
    small = {
        f"optim/layers.{i}.bias/exp_avg": torch.randn(_SMALL_ELEMENTS, generator=g)
        for i in range(_SMALL_TENSORS)
    }
    left = max(0, size - sum(tensor.nbytes for tensor in small.values()))
    count = max(1, left // _LARGE_BYTES)
    large = {
        f"model/layers.{i}.weight": torch.randn(left // count // 4, generator=g)
        for i in range(count)
    }
    return small | large


def _dcp_future(state: dict[str, Tensor], folder: Path) -> Any:
    return async_save(state, checkpoint_id=folder, no_dist=True)


def _begin_dcp(state: dict[str, Tensor], folder: Path) -> Callable[[], Any]:
    future = _dcp_future(state, folder)
    return lambda: future.result()


def _for(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def _settle() -> None:
    """Let what one measurement left to be written to disk not burden the next."""
    os.sync()


@contextmanager
def _workplace(folder: Path | None) -> Iterator[Path]:
    try:
        place = Path(tempfile.mkdtemp(prefix="dtrain-bench-", dir=folder))
    except OSError as error:
        raise DtrainError(f"--folder {folder}: cannot be written ({error.strerror})") from error
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns at each call, from a thread of its own, that it works without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
