"""Read graphs in other formats."""

from __future__ import annotations

from collections.abc import Callable

from dtrain.data.graph import GraphArrays
from dtrain.data.importers.edges import read_edges
from dtrain.data.importers.libraries import read_dgl, read_ogb, read_pyg
from dtrain.data.importers.mtx import read_mtx
from dtrain.data.importers.npz import read_npz
from dtrain.data.importers.options import ImportOptions
from dtrain.data.importers.planetoid import read_planetoid
from dtrain.errors import DtrainError

__all__ = ["IMPORTERS", "ImportOptions", "import_graph"]

IMPORTERS: dict[str, Callable[[str, ImportOptions], GraphArrays]] = {
    "planetoid": read_planetoid,
    "npz": read_npz,
    "edges": read_edges,
    "mtx": read_mtx,
    "pyg": read_pyg,
    "ogb": read_ogb,
    "dgl": read_dgl,
}


def import_graph(format_name: str, src: str, options: ImportOptions) -> GraphArrays:
    """Read the graph at ``src`` (a path or fsspec URL; for pyg, ogb and dgl a data set's name).

    Raises:
        DtrainError: unknown format, an option that it has no use for, or a bad source: one line
            that names the file and the place in it.
    """
    reader = IMPORTERS.get(format_name)
    if reader is None:
        raise DtrainError(f"FORMAT: expected one of {', '.join(IMPORTERS)}, got {format_name!r}")
    options.check(format_name)
    return reader(src, options)
