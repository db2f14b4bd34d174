"""Which faults have struck already, kept in the run folder for all lives of all workers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class Ledger:
    """One file for each firing, under ``RUN_DIR/faults/fired``.

    A firing is claimed by making its file, which only one process can; the claim outlives the
    process, so that a fault that kills a worker does not kill its successor too.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "faults" / "fired"

    def firings(self, fault: str) -> list[dict[str, Any]]:
        """The firings of the fault with this name, oldest first."""
        found = []
        for file in self._folder.glob(f"{fault}.*.json"):
            try:
                found.append((int(file.name.split(".")[-2]), json.loads(file.read_text())))
            except ValueError:
                # Claimed by a process that ended between making and filling it.
                found.append((int(file.name.split(".")[-2]), {}))
        return [firing for _, firing in sorted(found, key=lambda item: item[0])]

    def claim(self, fault: str, number: int, **fields: Any) -> bool:
        """Book firing ``number`` (from 0) of a fault; False when it was booked before."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"{fault}.{number}.json"
        data = json.dumps({"time": time.time(), **fields}).encode()
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return True
