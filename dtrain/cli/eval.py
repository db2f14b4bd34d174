"""``dtrain eval``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.errors import DtrainError

if TYPE_CHECKING:
    from torch import nn

    from dtrain.checkpoint import CheckpointInfo, CheckpointStore
    from dtrain.config import Config

_COLUMNS = ("count", "loss", "accuracy", "macro_f1", "roc_auc")


@dataclass(frozen=True)
class EvalReport:
    """The metrics of a run's weights: split name -> metric -> value.

    ``step``: the committed step that the weights are of. ``weights``: ``last``, or ``best`` where
    the run keeps the best on val (``eval.select``).
    """

    run_dir: str
    step: int
    weights: str
    split: int
    metrics: dict[str, dict[str, float]]


def eval_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder.")],
    split_name: Annotated[
        str | None, typer.Option("--split-name", help="train, val or test; default all three.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    checkpoint: Annotated[
        int | None, typer.Option("--checkpoint", help="Step of the checkpoint; default the newest.")
    ] = None,
) -> None:
    """Evaluate a run's weights exactly, over all nodes and all of their neighbours."""
    from dtrain.evaluate import SPLIT_NAMES

    if split_name is not None and split_name not in SPLIT_NAMES:
        raise DtrainError(
            f"--split-name: expected {', '.join(SPLIT_NAMES)}, got {split_name!r}; choose one"
        )
    report = evaluate_run(run_dir, checkpoint, on_warning=lambda text: typer.echo(text, err=True))
    names = [split_name] if split_name else list(SPLIT_NAMES)
    shown = replace(report, metrics={name: report.metrics[name] for name in names})
    if as_json:
        typer.echo(json.dumps(_finite(asdict(shown)), allow_nan=False))
    else:
        _print_table(shown)


def evaluate_run(
    run_dir: Path,
    checkpoint: int | None = None,
    *,
    on_warning: Callable[[str], None] | None = None,
) -> EvalReport:
    """Metrics of the weights that ``run_dir`` ended with, or of a given step's checkpoint.

    Without ``checkpoint`` they are the newest intact checkpoint's: the best on val where the run's
    ``eval.select`` is ``best``, else the last.
    ``on_warning`` is told of each newer checkpoint that is passed over as damaged or unfinished.

    Raises:
        DtrainError: no run folder, no such checkpoint, a store that is missing or no longer the one
            that was trained on, or weights that do not fit the configured model.
    """
    from dtrain.checkpoint import CheckpointError, CheckpointStore
    from dtrain.data.store import GraphStore
    from dtrain.evaluate import MEMORY_BYTES, evaluate
    from dtrain.models.build import build_layers

    config = _run_config(run_dir)
    checkpoints = CheckpointStore(config.checkpoint.url or str(run_dir / "checkpoints"))
    try:
        info = _choose(checkpoints, checkpoint, run_dir, on_warning)
        store = GraphStore.open(config.data.store, config.data.cache_dir)
        saved = checkpoints.progress(info)
        _check_dataset(saved, store.meta.fingerprint, config)
        wants_best = checkpoint is None and config.eval.select == "best"
        best = (saved.get("progress") or {}).get("best") if wants_best else None
        layers = build_layers(
            config.model, store.meta.num_features, store.meta.num_classes, config.seed
        )
        _load_weights(layers, checkpoints, info, "best" if best else "model")
    except CheckpointError as error:
        raise DtrainError(f"checkpoint.url: {error}; evaluate another checkpoint") from error
    metrics = evaluate(
        layers,
        store,
        config.data.split,
        chunk_nodes=config.eval.chunk_nodes,
        workdir=run_dir,
        memory_bytes=config.memory.limit or MEMORY_BYTES,
    )
    step, weights = (best["step"], "best") if best else (info.step, "last")
    return EvalReport(str(run_dir), step, weights, config.data.split, metrics)


def _run_config(run_dir: Path) -> Config:
    from dtrain.config import load_config

    file = run_dir / "config.yaml"
    if not file.is_file():
        raise DtrainError(
            f"RUN_DIR {run_dir}: expected a run's folder with a config.yaml, got "
            f"{'a folder without one' if run_dir.is_dir() else 'no folder'}; "
            "give the --run-dir of a run"
        )
    return load_config(file)


def _choose(
    checkpoints: CheckpointStore,
    step: int | None,
    run_dir: Path,
    on_warning: Callable[[str], None] | None,
) -> CheckpointInfo:
    if step is None:
        newest = checkpoints.newest(on_skip=on_warning)
        if newest is None:
            raise DtrainError(
                f"RUN_DIR {run_dir}: expected a complete checkpoint at {checkpoints.url}, "
                "got none; let the run go on until it saves one"
            )
        return newest
    found = checkpoints.list()
    matching = [info for info in found if info.step == step]
    if not matching:
        steps = ", ".join(str(s) for s in sorted({info.step for info in found})) or "none"
        raise DtrainError(
            f"--checkpoint: expected the step of a complete checkpoint at {checkpoints.url} "
            f"({steps}), got {step}"
        )
    faults = checkpoints.verify(max(matching))
    if faults:
        raise DtrainError(f"--checkpoint {step}: is damaged ({faults[0]}); choose another step")
    return max(matching)


def _check_dataset(progress: dict[str, Any], fingerprint: str, config: Config) -> None:
    identity = progress.get("identity")
    trained_on = identity.get("dataset") if isinstance(identity, dict) else None
    if trained_on is not None and trained_on != fingerprint:
        raise DtrainError(
            f"data.store {config.data.store}: expected the graph that was trained on (fingerprint "
            f"{trained_on[:16]}), got {fingerprint[:16]}; import the same graph in the same way"
        )


def _load_weights(
    layers: Sequence[nn.Module], checkpoints: CheckpointStore, info: CheckpointInfo, section: str
) -> None:
    import torch

    parameters = {
        f"{section}/layers.{i}.{name}": parameter
        for i, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad  # the others are what the model was built with
    }
    saved = checkpoints.load_tensors(info, list(parameters))
    with torch.no_grad():
        for name, parameter in parameters.items():
            if saved[name].shape != parameter.shape:
                raise DtrainError(
                    f"{info.name}: {name}: expected {list(parameter.shape)} by the run's config, "
                    f"got {list(saved[name].shape)}; use the model that was trained"
                )
            parameter.copy_(saved[name])


def _print_table(report: EvalReport) -> None:
    from rich.console import Console
    from rich.table import Table

    present = [c for c in _COLUMNS if any(c in values for values in report.metrics.values())]
    typer.echo(
        f"{report.run_dir}: {report.weights} weights (step {report.step}), split {report.split}"
    )
    table = Table()
    table.add_column("")
    for column in present:
        table.add_column(column, justify="right")
    for name, values in report.metrics.items():
        table.add_row(name, *(_cell(values.get(column)) for column in present))
    Console().print(table)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
