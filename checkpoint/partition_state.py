"""What a run keeps for each partition of the graph and must not lose, whoever owns it next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from dtrain.checkpoint.errors import CheckpointError

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

    def load(self, tensors: Mapping[str, Tensor], owned: Iterable[int]) -> None:
        """Hand tensors under their full names to the components that own their partitions now.

        What no component claims is passed over, and a component that gets nothing begins afresh.

        Raises:
            CheckpointError: a name begins like partition state and is not; no component has got
                anything then.
        """
        mine = set(owned)
        given: dict[tuple[int, str], dict[str, Tensor]] = {}
        for full, tensor in tensors.items():
            parsed = parse_name(full)
            if parsed is not None:
                partition, component, name = parsed
                given.setdefault((partition, component), {})[name] = tensor
        for (partition, component), found in sorted(given.items()):
            if partition in mine and component in self._components:
                self._components[component].load_partition_state(partition, found)


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
