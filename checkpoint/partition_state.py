"""What a run keeps for each partition of the graph and must not lose, whoever owns it next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.manifest import CheckpointInfo
from dtrain.checkpoint.store import CheckpointStore

_COMPONENT = re.compile(r"[A-Za-z0-9_.\-]+")
_PREFIX = "partition"


class PartitionComponent(Protocol):
    """A part of the program that keeps tensors for each partition: history embeddings, the
    statistics of a feature cache, a sampler's cursor."""

    def partition_state(self, partition: int) -> Mapping[str, Tensor]:
        """The tensors of an owned partition by name; of any dtype, shape and device.

        The live ones: a save copies them.
        """
        ...

    def load_partition_state(self, partition: int, tensors: Mapping[str, Tensor]) -> None:
        """Take over a partition with the tensors (on the CPU) that its last owner saved."""
        ...


@dataclass(frozen=True)
class Restored:
    """What a restore found.

    ``missing``: (partition, component) pairs of which the checkpoint has nothing, so that the
    component starts them afresh. ``unclaimed``: components in the checkpoint that are not
    registered; their state is not carried on.
    """

    missing: tuple[tuple[int, str], ...]
    unclaimed: tuple[str, ...]


class PartitionState:
    """The components of one worker that keep state for each partition.

    Tensors are saved as ``partition/{p}/{component}/{name}``, by the partition's owner alone, and
    so belong to no worker, stage or number of workers.
    """

    def __init__(self) -> None:
        self._components: dict[str, PartitionComponent] = {}

    def register(self, name: str, component: PartitionComponent) -> None:
        """Add a component under a name that is the same on every worker and in every run.

        Raises:
            ValueError: the name is taken, or has other characters than letters, digits, ``_``,
                ``.`` and ``-``.
        """
        if not _COMPONENT.fullmatch(name):
            raise ValueError(f"component: expected letters, digits, _, . or -, got {name!r}")
        if name in self._components:
            raise ValueError(f"component: {name} is registered already")
        self._components[name] = component

    def tensors(self, owned: Iterable[int]) -> dict[str, Tensor]:
        """The live tensors of the partitions that this worker owns, under the names to save."""
        return {
            f"{_PREFIX}/{partition}/{component}/{name}": tensor
            for partition in sorted(set(owned))
            for component, keeper in self._components.items()
            for name, tensor in keeper.partition_state(partition).items()
        }

    def restore(
        self, store: CheckpointStore, info: CheckpointInfo, owned: Iterable[int]
    ) -> Restored:
        """Hand the saved tensors of the partitions that this worker owns now to the components.

        Only these are read from the store; no collectives.

        Raises:
            CheckpointError: the checkpoint cannot be read; no component has got anything then.
        """
        mine = sorted(set(owned))
        wanted: dict[tuple[int, str], dict[str, str]] = {}
        unclaimed: set[str] = set()
        for full in store.names(info):
            parsed = parse_name(full)
            if parsed is None:
                continue
            partition, component, name = parsed
            if component not in self._components:
                unclaimed.add(component)
            elif partition in mine:
                wanted.setdefault((partition, component), {})[name] = full
        loaded = store.load_tensors(info, [f for names in wanted.values() for f in names.values()])
        missing = []
        for partition in mine:
            for component, keeper in self._components.items():
                names = wanted.get((partition, component))
                if names is None:
                    missing.append((partition, component))
                    continue
                keeper.load_partition_state(partition, {n: loaded[f] for n, f in names.items()})
        return Restored(tuple(missing), tuple(sorted(unclaimed)))


def parse_name(full: str) -> tuple[int, str, str] | None:
    """Partition, component and name of a saved tensor; None for other tensors.

    Raises:
        CheckpointError: it begins like partition state and is not.
    """
    prefix, _, rest = full.partition("/")
    if prefix != _PREFIX:
        return None
    number, _, rest = rest.partition("/")
    component, _, name = rest.partition("/")
    if not number.isdecimal() or not name:
        raise CheckpointError(f"{full}: expected partition/NUMBER/COMPONENT/NAME")
    return int(number), component, name
