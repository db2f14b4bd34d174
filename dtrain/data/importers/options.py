"""What a user can say about the graph that is imported."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from dtrain.errors import DtrainError

_TABLES = ("edges", "mtx")
_FORMATS_OF: dict[str, tuple[str, ...]] = {
    "name": ("planetoid",),
    "features": _TABLES,
    "labels": _TABLES,
    "label_column": _TABLES,
    "splits": _TABLES,
    "num_classes": _TABLES,
    "src_column": ("edges",),
    "dst_column": ("edges",),
    "header": ("edges",),
    "ids": ("edges",),
    "num_nodes": ("edges",),
}


@dataclass(frozen=True)
class ImportOptions:
    """Options of all importers; each names the command line's option of the same name.

    ``undirected`` and ``normalize_features``: None leaves it to the format. ``split_fractions``
    replace the source's own splits by a seeded one.
    """

    name: str | None = None
    undirected: bool | None = None
    keep_self_loops: bool = False
    normalize_features: bool | None = None
    features: str | None = None
    labels: str | None = None
    label_column: str | None = None
    splits: str | None = None
    split_fractions: tuple[float, ...] | None = None
    split_seed: int = 0
    src_column: str | None = None
    dst_column: str | None = None
    header: bool | None = None
    ids: Literal["auto", "int", "string"] = "auto"
    num_nodes: int | None = None
    num_classes: int | None = None
    download_dir: str | None = None

    def check(self, format_name: str) -> None:
        """Raise DtrainError for an option that ``format_name`` cannot use, or two that clash."""
        for field in fields(self):
            formats = _FORMATS_OF.get(field.name)
            given = getattr(self, field.name) != field.default
            if given and formats is not None and format_name not in formats:
                raise DtrainError(
                    f"--{field.name.replace('_', '-')}: expected with {' or '.join(formats)} only, "
                    f"got it with {format_name}; leave it out"
                )
        if self.splits and self.split_fractions:
            raise DtrainError("--splits: expected without --split-fractions, got both; choose one")
        if (self.src_column is None) != (self.dst_column is None):
            raise DtrainError("--src-column and --dst-column: expected both or neither, got one")
        if (self.splits or self.split_fractions) and format_name in _TABLES and not self.labels:
            raise DtrainError("--labels: expected a file where splits are asked for, got none")
