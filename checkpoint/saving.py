"""One save, as each worker of the group runs it, mostly in a background thread."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dtrain.checkpoint.archives import Archives
from dtrain.checkpoint.catalog import Catalog
from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.exchange import Exchange, tell_all
from dtrain.checkpoint.files import FileDigest, Files
from dtrain.checkpoint.manifest import METADATA, CheckpointInfo, parse_folder
from dtrain.checkpoint.plan import forms_of, plan_save
from dtrain.checkpoint.storage import Entry, dump_metadata, write_share
from dtrain.checkpoint.transaction import Transaction
from dtrain.checkpoint.urls import reason
from dtrain.errors import PeerLostError

_Said = list[dict[str, Any]]


class _Told(CheckpointError):
    """An error that some worker has named already."""


class SaveJob:
    """Three rounds of small messages, with the writing between the first and the second.

    1. All tell their tensors' names, dtypes and shapes; rank 0, which coordinates, names the
       folder. Every worker then plans alike.
    2. Each tells what it wrote; rank 0 writes ``.metadata`` and commits.
    3. Rank 0 tells the outcome.

    An error of a worker travels as text in the next round, so that all raise the same
    :class:`CheckpointError` and none waits for a worker that has given up.
    """

    def __init__(
        self,
        files: Files,
        catalog: Catalog,
        exchange: Exchange,
        step: int,
        progress: Mapping[str, Any],
        archives: Archives,
    ) -> None:
        self._archives = archives
        self._files = files
        self._exchange = exchange
        self._step = step
        self._transaction = Transaction(files, catalog, step, progress, exchange.check)
        self._coordinates = exchange.rank == 0

    def run(self, tensors: Mapping[str, Tensor] | Exception) -> CheckpointInfo:
        """Save CPU tensors, which nobody changes meanwhile; or tell the others why this worker
        cannot.

        Raises:
            CheckpointError: on every worker alike: some worker could not write.
            PeerLostError: the group broke.
        """
        offers = tell_all(self._exchange, self._attempt(lambda: self._offer(tensors)))
        try:
            self._raise_first(offers)
            assert not isinstance(tensors, Exception)
            plans, metadata = plan_save([offer["forms"] for offer in offers])
        except CheckpointError as error:
            self._abandon()
            raise self._failed(error) from None
        folder, token = offers[0]["folder"], offers[0]["token"]
        own = plans[self._exchange.rank]
        wrote = self._attempt(lambda: self._write(folder, token, tensors, own))
        results = tell_all(self._exchange, wrote)
        done: dict[str, Any] = {}
        if self._coordinates:
            done = self._attempt(lambda: self._commit(folder, metadata, results))
            if "error" in done:
                self._abandon()
        outcome = tell_all(self._exchange, done)
        try:
            self._raise_first(outcome[:1])
        except CheckpointError as error:
            raise self._failed(error) from None
        parsed = parse_folder(folder)
        assert parsed is not None
        return parsed[0]

    def _offer(self, tensors: Mapping[str, Tensor] | Exception) -> dict[str, Any]:
        if isinstance(tensors, Exception):
            raise tensors
        offer: dict[str, Any] = {"forms": forms_of(tensors)}
        if self._coordinates:
            # The token makes this save's files its own: a writer that is left over from an older
            # save of the step cannot write into them.
            offer |= {"folder": self._transaction.begin(), "token": uuid.uuid4().hex[:8]}
        return offer

    def _write(
        self, folder: str, token: str, tensors: Mapping[str, Tensor], plan: SavePlan
    ) -> dict[str, Any]:
        self._files.at("data.write")
        prefix = f"__{self._exchange.rank}_{token}_"
        entries, digests = write_share(self._files, folder, prefix, tensors, plan, self._archives)
        self._files.at("data.written")
        return {
            "entries": [[e.name, e.file, e.offset, e.length] for e in entries],
            "files": {name: asdict(digest) for name, digest in digests.items()},
        }

    def _commit(self, folder: str, metadata: Metadata, results: _Said) -> dict[str, Any]:
        self._raise_first(results)
        entries = [Entry(*entry) for result in results for entry in result["entries"]]
        digests = {
            name: FileDigest(**digest)
            for result in results
            for name, digest in result["files"].items()
        }
        data = dump_metadata(metadata, entries, folder)
        self._files.at("metadata.write")
        self._files.make_folder(folder)
        digests[METADATA] = self._files.write(f"{folder}/{METADATA}", data)
        self._transaction.commit(folder, digests)
        return {}

    def _attempt(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The message of this worker: what ``work`` returns, or why it failed.

        The texts travel, not the exceptions: those of storage libraries do not all survive
        pickling.
        """
        try:
            return work()
        except _Told as error:
            return {"error": str(error)}
        except PeerLostError:
            raise
        except Exception as error:
            return {"error": f"worker {self._exchange.worker}: {reason(error)}"}

    def _raise_first(self, messages: _Said) -> None:
        for message in messages:
            if "error" in message:
                raise _Told(message["error"])

    def _failed(self, cause: CheckpointError) -> CheckpointError:
        return CheckpointError(
            f"checkpoint of step {self._step} at {self._files.shown} was not saved: {cause}"
        )

    def _abandon(self) -> None:
        """Give back the space; no worker of the group writes any more."""
        if self._coordinates:
            self._transaction.abandon()
