"""``dtrain data``: make stores and look into them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.errors import DtrainError

if TYPE_CHECKING:
    from dtrain.data.graph import GraphArrays

# The libraries behind these commands take seconds to import, so each command imports its own:
# `dtrain --help` and `dtrain run` do not wait for them.

app = typer.Typer(
    help="Import, generate and inspect graph stores.", no_args_is_help=True, rich_markup_mode=None
)

_SOURCES = "planetoid, npz, edges, mtx, or a library's data set as pyg:NAME, ogb:NAME or dgl:NAME"

OutOption = Annotated[
    str, typer.Option("--out", help="Where the store goes: a path or fsspec URL.")
]
PartitionsOption = Annotated[int, typer.Option("--partitions", help="Number of partitions.")]
PartitionerOption = Annotated[
    str, typer.Option("--partitioner", help="metis, stream, range or random.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace a store at --out.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("import")
def import_command(
    format_name: Annotated[str, typer.Argument(metavar="FORMAT", help=_SOURCES)],
    src: Annotated[
        str | None,
        typer.Argument(metavar="SRC", help="File, folder or URL; or the data set's name."),
    ] = None,
    out: OutOption = ...,  # type: ignore[assignment]
    partitions: PartitionsOption = 1,
    partitioner: PartitionerOption = "metis",
    seed: Annotated[int, typer.Option(help="Seed of the partitioner.")] = 0,
    name: Annotated[
        str | None, typer.Option(help="planetoid: which data set of the folder.")
    ] = None,
    undirected: Annotated[
        bool | None,
        typer.Option("--undirected/--directed", help="Whether edges go both ways (default: yes)."),
    ] = None,
    keep_self_loops: Annotated[bool, typer.Option("--keep-self-loops")] = False,
    normalize_features: Annotated[
        bool | None,
        typer.Option(
            "--normalize-features/--no-normalize-features",
            help="Divide feature rows by their sum (default: planetoid only).",
        ),
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="Table of id and numbers, or JSON {id: [feature ids]}.")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="Table of id and label.")] = None,
    label_column: Annotated[str | None, typer.Option(help="(default: the last)")] = None,
    splits: Annotated[str | None, typer.Option(help="Table of id and train, val or test.")] = None,
    split_fractions: Annotated[
        str | None, typer.Option(help="Seeded split instead, such as 0.6,0.2,0.2.")
    ] = None,
    split_seed: Annotated[int, typer.Option()] = 0,
    src_column: Annotated[str | None, typer.Option(help="edges: column of sources.")] = None,
    dst_column: Annotated[str | None, typer.Option(help="edges: column of targets.")] = None,
    header: Annotated[
        bool | None, typer.Option("--header/--no-header", help="edges (default: judged).")
    ] = None,
    ids: Annotated[str, typer.Option(help="edges: auto, int or string.")] = "auto",
    num_nodes: Annotated[int | None, typer.Option(help="edges: ids are 0 to this less 1.")] = None,
    num_classes: Annotated[int | None, typer.Option(help="Labels are 0 to this less 1.")] = None,
    download_dir: Annotated[
        str | None, typer.Option(help="Where libraries keep data sets.")
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Turn a graph in another format into a store."""
    from dtrain.data.importers import ImportOptions, import_graph

    options = ImportOptions(
        name=name,
        undirected=undirected,
        keep_self_loops=keep_self_loops,
        normalize_features=normalize_features,
        features=features,
        labels=labels,
        label_column=label_column,
        splits=splits,
        split_fractions=_fractions(split_fractions),
        split_seed=split_seed,
        src_column=src_column,
        dst_column=dst_column,
        header=header,
        ids=_choice("--ids", ids, ("auto", "int", "string")),
        num_nodes=num_nodes,
        num_classes=num_classes,
        download_dir=download_dir,
    )
    kind, source = _source(format_name, src)
    _write(
        lambda: import_graph(kind, source, options),
        out, partitions, partitioner, seed, overwrite, as_json,
    )  # fmt: skip


@app.command("synth")
def synth_command(
    nodes: Annotated[int, typer.Option(help="Number of nodes.")],
    out: OutOption,
    avg_degree: Annotated[float, typer.Option(help="Mean number of neighbours.")] = 15.0,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    features: Annotated[int, typer.Option(help="Features of a node.")] = 64,
    homophily: Annotated[float, typer.Option(help="Expected fraction of edges in a class.")] = 0.7,
    signal: Annotated[float, typer.Option(help="Length of a class's mean over the noise.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the graph and the partitioner.")] = 0,
    feature_dtype: Annotated[str, typer.Option(help="float32 or float16, on disk.")] = "float32",
    train_fraction: Annotated[float, typer.Option()] = 0.6,
    val_fraction: Annotated[float, typer.Option()] = 0.2,
    test_fraction: Annotated[float | None, typer.Option(help="(default: the rest)")] = None,
    partitions: PartitionsOption = 1,
    partitioner: PartitionerOption = "metis",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Generate a graph: planted classes, power-law degrees, informative features."""
    from dtrain.data.synth import SynthSpec, synthesize

    spec = SynthSpec(
        nodes=nodes,
        avg_degree=avg_degree,
        classes=classes,
        features=features,
        homophily=homophily,
        seed=seed,
        signal=signal,
        feature_dtype=feature_dtype,
        train_fraction=train_fraction,
        val_fraction=val_fraction,
        test_fraction=test_fraction,
    )
    _write(lambda: synthesize(spec), out, partitions, partitioner, seed, overwrite, as_json)


@app.command("info")
def info_command(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Path or fsspec URL of a store.")],
    cache_dir: Annotated[str | None, typer.Option(help="Local copies of a remote store.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all and compare checksums.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print counts, degrees, homophily, partition quality and fingerprint of a store."""
    from dtrain.data.describe import describe, summary_lines
    from dtrain.data.store import GraphStore

    opened = GraphStore.open(store, cache_dir)
    if verify:
        opened.verify()
    facts = describe(opened)
    for line in [json.dumps(facts)] if as_json else summary_lines(facts):
        typer.echo(line)


def _write(
    make: Any,
    out: str,
    partitions: int,
    partitioner: str,
    seed: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Make a graph, write it and say what came of it."""
    from rich.console import Console

    from dtrain.data.describe import quality_rows
    from dtrain.data.writer import check_target, write_store

    # Before the work, not after it.
    check_target(out, overwrite)
    with Console(stderr=True).status("reading the graph") as status:
        graph: GraphArrays = make()
        status.update(f"partitioning and writing {graph.num_nodes:,} nodes")
        meta = write_store(
            out,
            graph,
            partitions=partitions,
            partitioner=partitioner,
            seed=seed,
            overwrite=overwrite,
        )
    quality = meta.quality.model_dump()
    if as_json:
        facts = meta.model_dump(mode="json", exclude={"arrays", "partition_offsets", "class_names"})
        typer.echo(json.dumps({"url": out, "num_partitions": meta.num_partitions, **facts}))
        return
    typer.echo(
        f"wrote {out}: {meta.num_nodes:,} nodes, {meta.num_edges:,} edges, {meta.num_features:,} "
        f"{meta.feature_format} features, {meta.num_classes} classes, {meta.num_splits} splits"
    )
    rows = "; ".join(f"{name} {text}" for name, text in quality_rows(quality))
    typer.echo(f"{meta.num_partitions} partitions ({meta.partitioner}): {rows}")
    typer.echo(f"fingerprint {meta.fingerprint}")
    if not meta.num_splits:
        typer.echo("no splits: training needs --labels with --splits or --split-fractions")


def _source(format_name: str, src: str | None) -> tuple[str, str]:
    """``pyg:Cora`` is ``pyg Cora``; other formats need a source."""
    kind, colon, name = format_name.partition(":")
    if colon and src is not None:
        raise DtrainError(f"SRC: expected none after {format_name}, got {src!r}; leave it out")
    source = name if colon else src
    if not source:
        raise DtrainError(f"SRC: expected a source for {kind}, got none")
    return kind, source


def _fractions(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise DtrainError(
            f"--split-fractions: expected three numbers such as 0.6,0.2,0.2, got {text!r}"
        ) from error


def _choice(field: str, value: str, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise DtrainError(f"{field}: expected one of {', '.join(choices)}, got {value!r}")
    return value
