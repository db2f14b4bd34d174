"""``dtrain checkpoint``: look at checkpoints, check, compare, thin out and export them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.errors import DtrainError

if TYPE_CHECKING:
    from dtrain.checkpoint import CheckpointInfo, CheckpointStore
    from dtrain.checkpoint.diff import Difference

# torch takes seconds to import, so each command imports what it needs.

app = typer.Typer(
    help="Look at, check, compare, thin out and export checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="Where checkpoints are: a path, fsspec URL or RUN_DIR.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
StepOption = Annotated[
    int | None, typer.Option("--step", help="Step of the checkpoint; default the newest.")
]


@app.command("ls")
def ls_command(url: UrlArgument, as_json: JsonOption = False) -> None:
    """List the committed checkpoints, oldest first; what they contain is not read."""
    store = _open(url)
    with _one_line():
        rows = [_row(store, info) for info in store.list()]
        unfinished = store.unfinished()
    if as_json:
        _print_json({"url": store.url, "checkpoints": rows, "unfinished": unfinished})
        return
    typer.echo(f"{store.url}: {len(rows)} committed")
    for row in rows:
        what = row["fault"] or (
            f"{row['files']} files, {row['bytes']:,} bytes, {row['workers']} workers, "
            f"{row['stages']} stages"
        )
        typer.echo(f"  {row['name']}: {what}")
    for folder in unfinished:
        typer.echo(f"  {folder}: not committed")


def _row(store: CheckpointStore, info: CheckpointInfo) -> dict[str, Any]:
    from dtrain.checkpoint import CheckpointError

    row: dict[str, Any] = {"name": info.name, "step": info.step, "attempt": info.attempt}
    empty = dict.fromkeys(("files", "bytes", "workers", "stages", "best_step", "torch"))
    try:
        manifest = store.manifest(info)
    except CheckpointError as error:
        return {**row, **empty, "fault": str(error)}
    best = (manifest.progress.get("progress") or {}).get("best") or {}
    return {
        **row,
        "files": len(manifest.files),
        "bytes": sum(digest.size for digest in manifest.files.values()),
        "workers": manifest.progress.get("workers"),
        "stages": manifest.progress.get("stages"),
        "best_step": best.get("step"),
        "torch": manifest.torch_version,
        "fault": None,
    }


@app.command("verify")
def verify_command(
    url: UrlArgument,
    step: StepOption = None,
    every: Annotated[bool, typer.Option("--all", help="Verify all, not the newest alone.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read all files of a checkpoint and check sizes and checksums; exit code 1 on a fault."""
    store = _open(url)
    with _one_line():
        infos = store.list() if every else [_choose(store, step)]
        faults = {info.name: store.verify(info) for info in infos}
    if not faults:
        raise DtrainError(f"URL: expected a committed checkpoint at {store.url}, got none")
    if as_json:
        intact = not any(faults.values())
        _print_json({"url": store.url, "intact": intact, "faults": faults})
    else:
        for name, found in faults.items():
            typer.echo(f"{name}: {'intact' if not found else f'{len(found)} faults'}")
            for fault in found:
                typer.echo(f"  {fault}")
    if any(faults.values()):
        raise typer.Exit(1)


@app.command("diff")
def diff_command(
    url: UrlArgument,
    other_url: Annotated[
        str | None, typer.Argument(metavar="[URL2]", help="Where the right one is; default URL.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Left; default the newest but one.")] = None,
    other_step: Annotated[int | None, typer.Option(help="Right; default the newest.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints bit by bit; exit code 1 where they differ."""
    from dtrain.checkpoint.diff import diff

    left = _open(url)
    right = left if other_url is None else _open(other_url)
    with _one_line():
        right_info = _choose(right, other_step)
        if step is None and other_url is None:
            older = [i for i in left.list() if i < right_info]
            if not older:
                raise DtrainError(
                    f"URL: expected two checkpoints at {left.url}, got one; give URL2 or --step"
                )
            left_info = older[-1]
        else:
            left_info = _choose(left, step)
        found = diff(left, left_info, right, right_info)
    sides = {"left": f"{left.url}/{left_info.name}", "right": f"{right.url}/{right_info.name}"}
    if as_json:
        _print_json({**sides, "same": not found, **asdict(found)})
    else:
        _print_difference(sides, found)
    if found:
        raise typer.Exit(1)


def _print_difference(sides: dict[str, str], found: Difference) -> None:
    typer.echo(f"left  {sides['left']}\nright {sides['right']}")
    for title, fields in (("identity", found.identity), ("progress", found.progress)):
        if fields:
            typer.echo(f"{title}: {', '.join(fields)} differ")
    for title, names in (("left", found.only_left), ("right", found.only_right)):
        for name in names:
            typer.echo(f"only {title}: {name}")
    for name, change in found.changed.items():
        if change.elements is None:
            typer.echo(f"{name}: {change.forms[0]} and {change.forms[1]}")
        else:
            typer.echo(
                f"{name}: {change.elements} of {change.of} elements, at most {change.max_abs:g}"
            )
    typer.echo(f"{found.equal} tensors equal, {len(found.changed)} differ")


@app.command("prune")
def prune_command(
    url: UrlArgument,
    keep: Annotated[int, typer.Option(help="Newest checkpoints that stay.")],
    keep_every: Annotated[
        int | None, typer.Option(help="Steps that are multiples of it stay for good.")
    ] = None,
    pin: Annotated[list[int] | None, typer.Option(help="A step that stays; repeat.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove older checkpoints; the newest intact one and the best evaluation's always stay."""
    from dtrain.checkpoint import Retention

    retention = Retention(keep, keep_every, frozenset(pin or []))
    store = _open(url)
    with _one_line():
        rows = [_row(store, info) for info in store.list()]
        best = {row["best_step"] for row in rows[-1:]} - {None}
        retention = Retention(keep, keep_every, retention.pinned | best)
        removed = store.prune(retention, dry_run=dry_run)
        kept = [row["name"] for row in rows if row["name"] not in removed]
    if as_json:
        _print_json({"url": store.url, "removed": removed, "kept": kept, "dry_run": dry_run})
        return
    verb = "would go" if dry_run else "removed"
    typer.echo("\n".join([f"{verb}: {name}" for name in removed] or ["nothing to remove"]))
    typer.echo(f"kept: {', '.join(kept) or 'none'}")


@app.command("export")
def export_command(
    url: UrlArgument,
    out: Annotated[Path, typer.Option("--out", help="A folder that does not exist yet.")],
    step: StepOption = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best evaluation's weights (eval.select: best).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the model's weights as safetensors with PyTorch Geometric's names, a description,
    and a program (torch.export) that runs without dtrain."""
    from dtrain.checkpoint.export import export_model

    store = _open(url)
    with _one_line():
        info = _choose(store, step)
        faults = store.verify(info)
        if faults:
            raise DtrainError(f"{info.name}: is damaged ({faults[0]}); choose another step")
        exported = export_model(store, info, out, best=best)
    if as_json:
        _print_json(asdict(exported))
        return
    typer.echo(
        f"{info.name} ({exported.weights} weights, step {exported.step}) -> {exported.folder}: "
        f"{', '.join(exported.files)}"
    )
    if exported.pyg is not None:
        typer.echo(f"loads into torch_geometric.nn.{exported.pyg['class']}, see model.json")
    else:
        typer.echo(f"no equivalent PyG model: {exported.pyg_missing}")


def _open(url: str) -> CheckpointStore:
    """The store at a URL, or that of the run whose folder it is."""
    from dtrain.checkpoint import CheckpointStore

    config_file = Path(url) / "config.yaml"
    if "://" not in url and config_file.is_file():
        from dtrain.config import load_config

        return CheckpointStore(load_config(config_file).checkpoint.url or f"{url}/checkpoints")
    return CheckpointStore(url)


def _choose(store: CheckpointStore, step: int | None) -> CheckpointInfo:
    """The last attempt of a committed step; the newest step where none is given."""
    infos = store.list()
    matching = infos if step is None else [info for info in infos if info.step == step]
    if not matching:
        steps = ", ".join(str(s) for s in sorted({info.step for info in infos})) or "none"
        what = "a committed checkpoint" if step is None else f"step {step}"
        raise DtrainError(f"URL: expected {what} at {store.url}, committed are: {steps}")
    return max(matching)


@contextmanager
def _one_line() -> Iterator[None]:
    """A store that cannot be read is the user's to mend."""
    from dtrain.checkpoint import CheckpointError

    try:
        yield
    except CheckpointError as error:
        raise DtrainError(
            f"URL: {error}; check the URL and the credentials in the environment"
        ) from error


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
