"""Writing an exported model to a folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.digest import weights_sha256
from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.export.names import BUILT_IN, PlainModel, plain_model
from dtrain.checkpoint.export.program import trace
from dtrain.checkpoint.manifest import CheckpointInfo
from dtrain.checkpoint.store import CheckpointStore
from dtrain.errors import DtrainError

FORMAT = 1
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
PROGRAM = "model.pt2"


@dataclass(frozen=True)
class Exported:
    """What was written: ``files`` in ``folder``, of ``step``; and whether PyG has the model."""

    folder: str
    files: tuple[str, ...]
    step: int
    weights: str
    weights_sha256: str
    pyg: dict[str, Any] | None
    pyg_missing: str


def export_model(
    store: CheckpointStore, info: CheckpointInfo, out: Path, *, best: bool = False
) -> Exported:
    """Write ``model.safetensors`` (float32), ``model.json`` and, for built-in models,
    ``model.pt2`` to a new folder.

    Args:
        store: where the checkpoint is.
        info: an intact checkpoint.
        out: the folder; it must not exist. It appears complete or not at all.
        best: the weights of the best evaluation, not the last ones.

    Raises:
        DtrainError: ``out`` exists or cannot be written, the checkpoint lacks what is needed, or
            the package ``safetensors`` is not installed.
        CheckpointError: the checkpoint cannot be read.
    """
    if out.exists():
        raise DtrainError(f"--out {out}: expected a folder that does not exist yet; choose another")
    progress = store.progress(info)
    model = _model_section(progress, info)
    weights, step = _weights(store, info, progress, best)
    plain = plain_model(model, weights) if model["name"] in BUILT_IN else None
    tensors = weights if plain is None else plain.tensors
    digest = weights_sha256(weights)
    description = {
        "format": FORMAT,
        "step": step,
        "weights": "best" if best else "last",
        "weights_sha256": digest,
        "dataset_fingerprint": (progress.get("identity") or {}).get("dataset"),
        "model": model,
        **_description(plain),
        "tensors": {
            name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": [*t.shape]}
            for name, t in sorted(tensors.items())
        },
    }
    files = _write(out, tensors, description, plain)
    return Exported(
        str(out),
        files,
        step,
        "best" if best else "last",
        digest,
        None if plain is None else plain.pyg,
        "the model is not a built-in one" if plain is None else plain.pyg_missing,
    )


def _model_section(progress: Mapping[str, Any], info: CheckpointInfo) -> dict[str, Any]:
    identity = progress.get("identity")
    model = identity.get("model") if isinstance(identity, dict) else None
    if not isinstance(model, dict) or "name" not in model:
        raise DtrainError(
            f"{info.name}: expected a run's checkpoint with its model's configuration in the "
            "manifest, got one without; export a checkpoint of dtrain run"
        )
    return model


def _weights(
    store: CheckpointStore, info: CheckpointInfo, progress: Mapping[str, Any], best: bool
) -> tuple[dict[str, Tensor], int]:
    """Parameters by name in float32, from the float32 masters where there are any."""
    section, step = "model/", info.step
    if best:
        kept = (progress.get("progress") or {}).get("best")
        if not kept:
            raise DtrainError(
                f"--best: {info.name} has no best weights; set eval.select: best in the run"
            )
        section, step = "best/", int(kept["step"])
    names = store.names(info)
    sources = {n.removeprefix(section): n for n in names if n.startswith(section)}
    if not best:
        masters = {n.removeprefix("master/"): n for n in names if n.startswith("master/")}
        sources |= masters
    if not sources:
        raise CheckpointError(f"{info.name}: no tensor {section}... in it")
    loaded = store.load_tensors(info, [*sources.values()])
    return {name: loaded[source].float() for name, source in sorted(sources.items())}, step


def _description(plain: PlainModel | None) -> dict[str, Any]:
    if plain is None:
        return {"pyg": None, "pyg_missing": "the model is not a built-in one", "program": None}
    return {
        "in_features": plain.in_features,
        "out_features": plain.out_features,
        "num_layers": plain.num_layers,
        "pyg": plain.pyg,
        "pyg_missing": plain.pyg_missing or None,
        "program": {
            "file": PROGRAM,
            "inputs": {
                "x": f"float32 [nodes, {plain.in_features}]",
                "edge_index": "int64 [2, edges], sources above destinations",
            },
            "output": f"float32 [nodes, {plain.out_features}], logits",
            "torch": torch.__version__,
        },
    }


def _write(
    out: Path,
    tensors: dict[str, Tensor],
    description: dict[str, Any],
    plain: PlainModel | None,
) -> tuple[str, ...]:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise DtrainError(
            "export needs the package safetensors, which is not installed; "
            "run pip install 'dtrain[export]'"
        ) from error
    out = out.absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise DtrainError(f"--out {out}: cannot be written ({error.strerror})") from error
    try:
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        (part / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
        if plain is not None:
            torch.export.save(trace(plain), part / PROGRAM)
        part.chmod(0o755)
        files = tuple(sorted(file.name for file in part.iterdir()))
        os.rename(part, out)
    except OSError as error:
        raise DtrainError(f"--out {out}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return files
