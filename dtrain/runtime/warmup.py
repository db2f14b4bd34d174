"""Pay for what is paid once before others wait for this worker: loading compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.kernels.csr import SparseRows
from dtrain.models.layer import LayerContext, State
from dtrain.runtime.setup import Job


def warm_up(job: Job) -> None:
    """Run one small microbatch through the whole model and back, on layers that are thrown away.

    The microbatch is the first of step 0 that has seeds; with the full sampler the blocks are
    those that training uses, and stay.
    """
    microbatches = range(job.layout.microbatches)
    first = next((m for m in microbatches if len(job.source.seeds(0, m))), None)
    if first is None:
        return
    sample = job.source.sample(0, first)
    features = job.store.gather_features(sample.input_nodes)
    blocks, elsewhere = sample.blocks, job.device.type != "cpu"
    if elsewhere:
        features, blocks = features.to(job.device), [block.to(job.device) for block in blocks]
    if job.prepare is not None and isinstance(features, Tensor):
        stored = job.features.stored_features(sample.input_nodes)
        job.prepare(0, first, sample.blocks[0], features if stored is None else stored)
    state: State = features
    total = torch.zeros((), device=job.device)
    for index, (layer, block) in enumerate(zip(job.fresh_layers(), blocks, strict=True)):
        out = (layer.to(job.device) if elsewhere else layer)(
            block, state, LayerContext(index, True)
        )
        state = out
        rows = out if isinstance(out, tuple) else (out,)
        total = sum((t.float().sum() for t in rows if t.is_floating_point()), total * 0.0)
    if not isinstance(state, SparseRows) and total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
