"""Edge lists in CSV, other separated text, and Parquet."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtrain.data.graph import GraphArrays
from dtrain.data.importers.attributes import assemble
from dtrain.data.importers.options import ImportOptions
from dtrain.data.importers.tables import read_id_pairs
from dtrain.errors import DtrainError


def read_edges(src: str, options: ImportOptions) -> GraphArrays:
    """A file of edges, one a row: two ids, in the first two columns unless named.

    Ids are integers or strings; the nodes are the ids of edges, features and labels in increasing
    order, or 0 .. ``num_nodes`` - 1 where that is given. Edges are made undirected unless
    ``undirected`` is False. See :func:`dtrain.data.importers.attributes.assemble` for the other
    files.

    Raises:
        DtrainError: one line that names the file and the line.
    """
    columns = None
    if options.src_column is not None and options.dst_column is not None:
        columns = (options.src_column, options.dst_column)
    if options.num_nodes is not None and options.num_nodes < 1:
        raise DtrainError(f"--num-nodes: expected at least 1, got {options.num_nodes}")
    pairs = read_id_pairs(
        src, columns=columns, header=options.header, ids=options.ids, num_nodes=options.num_nodes
    )
    if options.num_nodes is not None and pairs.is_text:
        raise DtrainError("--num-nodes: expected with integer ids only, got strings; leave it out")
    everyone: Any = [] if pairs.is_text else np.arange(options.num_nodes or 0)
    graph = assemble(pairs, everyone, f"edges {src.rsplit('/', 1)[-1]}", options)
    if options.num_nodes is not None and graph.num_nodes > options.num_nodes:
        raise DtrainError(
            f"--num-nodes: expected feature and label ids in [0, {options.num_nodes - 1}], got "
            f"{graph.ids[-1] if graph.ids is not None else graph.num_nodes - 1}"
        )
    return graph
