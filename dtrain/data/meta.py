"""What ``meta.json`` of a graph store says."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dtrain.data.location import Location, unreadable
from dtrain.errors import DtrainError

SCHEMA_VERSION = 1
META_FILE = "meta.json"
SPLIT_PARTS = ("train", "val", "test")


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ArrayMeta(_Frozen):
    """One array of a store: ``NAME.npy`` holds it; ``sha256`` is over its little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    file_bytes: int = Field(ge=0)
    sha256: str


class QualityMeta(_Frozen):
    """How good a partitioning is; see :class:`dtrain.data.partition.Quality`."""

    edge_cut: float
    node_balance: float
    edge_balance: float


class GraphMeta(_Frozen):
    """Counts, formats and identity of a graph store.

    ``partition_offsets``: int [P + 1]; partition ``p`` holds the nodes
    ``partition_offsets[p] .. partition_offsets[p + 1] - 1``. ``directed`` is False when every edge
    is stored in both directions. ``class_names`` are the source's own labels, where it had any.
    """

    schema_version: int
    num_nodes: int = Field(ge=1)
    num_edges: int = Field(ge=0)
    num_features: int = Field(ge=1)
    num_classes: int = Field(ge=0)
    num_splits: int = Field(ge=0)
    directed: bool
    partition_offsets: tuple[int, ...]
    partitioner: str
    quality: QualityMeta
    feature_format: Literal["dense", "csr"]
    feature_dtype: Literal["float32", "float16"]
    source: str
    class_names: tuple[str, ...] | None = None
    arrays: dict[str, ArrayMeta]
    fingerprint: str

    @model_validator(mode="after")
    def _offsets(self) -> GraphMeta:
        offsets = self.partition_offsets
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != self.num_nodes:
            raise ValueError(f"partition_offsets: expected 0 ... {self.num_nodes}, got {offsets}")
        if list(offsets) != sorted(offsets):
            raise ValueError("partition_offsets: expected an increasing sequence")
        missing = [name for name in self.array_names() if name not in self.arrays]
        if missing:
            raise ValueError(f"arrays: expected an entry for {missing[0]}, got none")
        return self

    @property
    def num_partitions(self) -> int:
        return len(self.partition_offsets) - 1

    def feature_array_names(self) -> tuple[str, ...]:
        """The arrays that hold the features."""
        if self.feature_format == "dense":
            return ("features",)
        return ("features_indptr", "features_indices", "features_values")

    def array_names(self) -> list[str]:
        """All arrays of the store."""
        splits = [split_array(k, part) for k in range(self.num_splits) for part in SPLIT_PARTS]
        return ["indptr", "indices", *self.feature_array_names(), "labels", "original_ids", *splits]

    def to_json(self) -> str:
        """The text of ``meta.json``."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


def split_array(k: int, part: str) -> str:
    """Name of the array that holds ``part`` (train, val or test) of split ``k``."""
    return f"split_{k}_{part}"


def compute_fingerprint(facts: dict[str, Any], arrays: dict[str, ArrayMeta]) -> str:
    """Identity of a dataset: sha256 over every array's type, shape and content and ``facts``.

    ``facts`` are the JSON values that decide what the arrays mean (partition offsets, classes).
    Where the store lies, what made it and file sizes do not enter.
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        "facts": facts,
        "arrays": {name: [a.dtype, list(a.shape), a.sha256] for name, a in arrays.items()},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_meta(text: bytes | str, url: str) -> GraphMeta:
    """Read ``meta.json``; ``url`` (of the store) is named in messages.

    Raises:
        DtrainError: not JSON, another schema version, or a field that is missing or wrong.
    """
    where = f"store {url}: {META_FILE}"
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise DtrainError(f"{where}: not valid JSON; import the graph again") from error
    if not isinstance(raw, dict):
        raise DtrainError(f"{where}: expected a JSON object, got {type(raw).__name__}")
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION:
        raise DtrainError(
            f"{where}: schema_version: expected {SCHEMA_VERSION}, got {version}; import the graph "
            "again with this version of dtrain"
        )
    try:
        return GraphMeta.model_validate(raw)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"]) or "content"
        message = problem["msg"].removeprefix("Value error, ")
        raise DtrainError(f"{where}: {field}: {message}; import the graph again") from error


def check_sizes(place: Location, meta: GraphMeta) -> None:
    """Check that the files of the store at ``place`` are as long as ``meta`` says.

    Raises:
        DtrainError: a file is missing, cut short or longer.
    """
    for name, array in meta.arrays.items():
        try:
            size = int(place.fs.size(place.join(f"{name}.npy")))
        except Exception as error:
            unreadable(f"store {place.url}: {name}.npy", error)
        if size != array.file_bytes:
            raise DtrainError(
                f"store {place.url}: {name}.npy: expected {array.file_bytes} bytes, got {size}; "
                "the file is damaged, import the graph again"
            )
