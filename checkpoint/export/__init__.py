"""Models that leave dtrain: safetensors with plain PyTorch names, and a self-contained program."""

from dtrain.checkpoint.export.write import Exported, export_model

__all__ = ["Exported", "export_model"]
