"""The graphs that operators are measured on."""

from __future__ import annotations

from pathlib import Path

import torch

from dtrain.data.graph import GraphArrays
from dtrain.data.importers import ImportOptions, import_graph
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.kernels.csr import Csr

SYNTHETIC = "synthetic"
_REAL = {
    "tolokers": ("npz", "heterophilous/tolokers.npz", ImportOptions()),
    "road": ("mtx", "mtx/luxembourg_osm.mtx", ImportOptions(undirected=True)),
}


def skewed(nodes: int, features: int = 64) -> GraphArrays:
    """A generated power-law graph of about 15 neighbours a node and 10 classes."""
    return synthesize(SynthSpec(nodes=nodes, avg_degree=15, classes=10, features=features, seed=0))


def patterns(nodes: int, folder: Path | None) -> dict[str, Csr]:
    """The generated graph, and those real ones that lie in ``folder``, by their names.

    ``folder`` may hold ``heterophilous/tolokers.npz`` (11,758 nodes, dense) and
    ``mtx/luxembourg_osm.mtx`` (a road network of 114,599 nodes, some two neighbours each).
    """
    found = {SYNTHETIC: _pattern(skewed(nodes))}
    for name, (kind, file, options) in _REAL.items():
        if folder is not None and (folder / file).is_file():
            found[name] = _pattern(import_graph(kind, str(folder / file), options))
    return found


def _pattern(graph: GraphArrays) -> Csr:
    indptr = torch.from_numpy(graph.indptr)
    return Csr(indptr, torch.from_numpy(graph.indices).long(), len(indptr) - 1)
