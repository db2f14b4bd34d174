"""Durable state: what is saved, where, and when it counts as saved."""

from dtrain.checkpoint.digest import weights_sha256
from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.manifest import CheckpointInfo
from dtrain.checkpoint.store import CheckpointStore
from dtrain.checkpoint.urls import redact

__all__ = ["CheckpointError", "CheckpointInfo", "CheckpointStore", "redact", "weights_sha256"]
