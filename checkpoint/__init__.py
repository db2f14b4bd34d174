"""Durable state: what is saved, where, and when it counts as saved."""

from dtrain.checkpoint.digest import weights_sha256
from dtrain.checkpoint.errors import CheckpointError, CheckpointGoneError
from dtrain.checkpoint.exchange import Alone, Exchange
from dtrain.checkpoint.manifest import CheckpointInfo
from dtrain.checkpoint.partition_state import PartitionComponent, PartitionState
from dtrain.checkpoint.pending import PendingSave
from dtrain.checkpoint.retention import Retention
from dtrain.checkpoint.retry import Retry
from dtrain.checkpoint.store import CheckpointStore
from dtrain.checkpoint.urls import redact

__all__ = [
    "Alone",
    "CheckpointError",
    "CheckpointGoneError",
    "CheckpointInfo",
    "CheckpointStore",
    "Exchange",
    "PartitionComponent",
    "PartitionState",
    "PendingSave",
    "Retention",
    "Retry",
    "redact",
    "weights_sha256",
]
