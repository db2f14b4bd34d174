"""``dtrain bench kernels|sample|train``: speed beside torch and PyTorch Geometric."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from dtrain.environment import real_graphs
from dtrain.errors import DtrainError


def kernels(
    against: Annotated[str, typer.Option(help="Peers, of torch and pyg.")] = "torch,pyg",
    threads: Annotated[int, typer.Option(min=1, help="Threads of every contender.")] = 2,
    nodes: Annotated[int, typer.Option(min=1000, help="Nodes of the generated graph.")] = 200_000,
    graphs: Annotated[
        Path | None, typer.Option(help="Folder of real graphs (default: DTRAIN_TEST_DATA).")
    ] = None,
    only: Annotated[str, typer.Option(help="Only operators whose name has this in it.")] = "",
    budget_s: Annotated[float, typer.Option(help="Seconds for each comparison.")] = 1.0,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: the GPU's kernels, at most five minutes.")
    ] = "cpu",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure the graph operators beside torch's and PyTorch Geometric's."""
    if device == "cuda":
        _kernels_on_gpu(against, nodes, graphs or real_graphs(), budget_s, only, as_json)
        return
    if device != "cpu":
        raise DtrainError(f"--device: expected cpu or cuda, got {device!r}")
    from dtrain.bench.kernels import bench_kernels

    report = bench_kernels(
        against,
        threads=threads,
        nodes=nodes,
        folder=graphs or real_graphs(),
        budget_s=budget_s,
        only=only,
        say=lambda text: typer.echo(text, err=True),
    )
    if as_json:
        typer.echo(json.dumps(report.as_json()))
        return
    for row in report.rows:
        typer.echo(
            f"{row.op:16} {row.graph:10} {row.shape:6} {row.ms:9.2f} ms, "
            f"{row.peer:24} {row.peer_ms:9.2f} ms: {row.ratio:6.2f}"
        )
    for name, mean in report.geomean.items():
        typer.echo(f"{name:26} {mean}")


def _kernels_on_gpu(
    against: str, nodes: int, folder: Path | None, budget_s: float, only: str, as_json: bool
) -> None:
    from dtrain.bench.gpu import bench_gpu

    report = bench_gpu(
        against,
        nodes=nodes,
        folder=folder,
        budget_s=budget_s,
        only=only,
        say=lambda text: typer.echo(text, err=True),
    )
    if as_json:
        typer.echo(json.dumps(report.as_json()))
        return
    for line in report.lines():
        typer.echo(line)


def sample(
    against: Annotated[str, typer.Option(help="Peers, of torch and pyg.")] = "torch,pyg",
    threads: Annotated[int, typer.Option(min=1, help="Threads, a batch each.")] = 2,
    nodes: Annotated[int, typer.Option(min=2000, help="Nodes of the generated graph.")] = 200_000,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; medians are reported.")] = 9,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure the neighbour sampler: whole blocks of 2 layers, fanouts 10 and 10."""
    from dtrain.bench.sample import bench_sample

    report = bench_sample(against, threads=threads, nodes=nodes, repeats=repeats)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
        return
    typer.echo(f"{report.sampled_edges_per_s / 1e6:.1f} million edges/s, {threads} threads")
    typer.echo(f"{report.one_thread_edges_per_s / 1e6:.1f} million edges/s, 1 thread")
    typer.echo(f"{report.edges_per_cpu_s / 1e6:.1f} million edges for each second of a core")
    typer.echo(f"{report.rss_growth_bytes / 1e6:.1f} MB more memory after {repeats} repeats")
    for row in report.rows:
        typer.echo(f"{row.ratio} x {row.peer}")


def train(
    against: Annotated[str, typer.Option(help="Peers, of torch and pyg.")] = "torch,pyg",
    threads: Annotated[int, typer.Option(min=1, help="Threads where one process runs.")] = 2,
    nodes: Annotated[int, typer.Option(min=5000, help="Nodes of the generated graph.")] = 200_000,
    steps: Annotated[int, typer.Option(min=10, help="Steps measured in each run.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; medians are reported.")] = 3,
    pipeline: Annotated[bool, typer.Option(help="Also 4 workers against torch's DDP.")] = True,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure training end to end: 2-layer GraphSAGE, hidden 128, fanouts 10 and 10."""
    from dtrain.bench.train import bench_train

    with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as folder:
        report = bench_train(
            against,
            Path(folder),
            nodes=nodes,
            threads=threads,
            steps=steps,
            repeats=repeats,
            pipeline=pipeline,
            say=lambda text: typer.echo(text, err=True),
        )
    if as_json:
        typer.echo(json.dumps(report.as_json()))
        return
    for name, speed in report.seeds_per_s.items():
        typer.echo(f"{name:16} {speed:9.0f} seeds/s")
    typer.echo(f"dtrain / pyg ({report.pyg_way}): {report.seeds_per_s_vs_pyg}")
    typer.echo(f"pipeline / ddp: {report.pipeline_vs_ddp}")
    typer.echo(f"pipeline with two holders a stage / ddp: {report.staged_vs_ddp}")
