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
        mine = set(owned)
        parsed = {full: parse_name(full) for full in store.names(info)}
        unclaimed = {p[1] for p in parsed.values() if p and p[1] not in self._components}
        wanted = [f for f, p in parsed.items() if p and p[0] in mine and p[1] not in unclaimed]
        found = self.load(store.load_tensors(info, wanted), mine)
        return Restored(found.missing, tuple(sorted(unclaimed)))

    def load(self, tensors: Mapping[str, Tensor], owned: Iterable[int]) -> Restored:
        """Hand tensors under their full names to the components; other tensors are passed over.

        Raises:
            CheckpointError: a name begins like partition state and is not.
        """
        mine = sorted(set(owned))
        given: dict[tuple[int, str], dict[str, Tensor]] = {}
        for full, tensor in tensors.items():
            parsed = parse_name(full)
            if parsed is not None:
                partition, component, name = parsed
                given.setdefault((partition, component), {})[name] = tensor
        missing = []
        for partition in mine:
            for component, keeper in self._components.items():
                found = given.get((partition, component))
                if found is None:
                    missing.append((partition, component))
                else:
                    keeper.load_partition_state(partition, found)
        unclaimed = {component for _, component in given} - {*self._components}
        return Restored(tuple(missing), tuple(sorted(unclaimed)))


def is_partition_state(full: str) -> bool:
    """Whether a saved tensor's name is one of partition state."""
    return full.startswith(f"{_PREFIX}/")


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
