"""Forward and backward of one stage on one microbatch.

Every layer is an autograd segment of its own, so that the operations, their order and hence every
bit are the same wherever the model is cut into stages. Gradients are taken with
``torch.autograd.grad``: nothing accumulates into the parameters, and no hook of DeepSpeed fires.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from dtrain.data.block import Block
from dtrain.errors import DtrainError
from dtrain.kernels.csr import SparseRows
from dtrain.models.layer import LayerContext, Prepared, State, layer_key
from dtrain.runtime.engine import StageEngine
from dtrain.runtime.inputs import MicrobatchInputs
from dtrain.scheduler.costmodel import BlockSize, CostModel, Direction, LayerShape
from dtrain.scheduler.plan import Kind

Rows = tuple[Tensor, ...]


@dataclass
class _Segment:
    """What a layer's backward needs: its differentiable inputs and its outputs."""

    layer: int
    inputs: Rows
    outputs: Rows


@dataclass
class _InFlight:
    segments: list[_Segment] = field(default_factory=list)
    loss: Tensor | None = None


@dataclass(frozen=True)
class _Given:
    """What the forward of a microbatch was given."""

    step: int
    inputs: MicrobatchInputs
    received: Rows | None
    step_seeds: int


class StageCompute:
    """Runs a stage's layers; keeps the activations of microbatches in flight.

    ``grads[m][i]`` is the gradient of ``engine.parameters[i]`` from microbatch ``m``; ``losses[m]``
    its share of the step's mean loss (last stage only). Both are emptied by :meth:`reset`.
    ``layer_seconds``: (layer, seconds) of the newest action. ``shapes``: of all the model's layers.
    ``reference``: by which work is measured, one that is alike on all workers. ``recompute``: keep
    what a microbatch's forward was given instead of its activations, and run it again in its
    backward (activation checkpointing, Chen et al., 2016).
    """

    def __init__(
        self,
        engine: StageEngine,
        layers: range,
        shapes: Sequence[LayerShape],
        reference: CostModel,
        seed: int,
        *,
        is_last: bool,
        recompute: bool = False,
    ) -> None:
        self._engine = engine
        self._layers = layers
        self._shapes = shapes
        self.reference = reference
        self._seed = seed
        self._is_last = is_last
        self._index = {id(p): i for i, p in enumerate(engine.parameters)}
        self.recompute = recompute
        self._given: dict[int, _Given] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self.grads: dict[int, list[Tensor | None]] = {}
        self.losses: dict[int, float] = {}
        self.layer_seconds: list[tuple[int, float]] = []

    @property
    def device(self) -> torch.device:
        """Where the stage computes."""
        return self._engine.device

    def work(self, inputs: MicrobatchInputs) -> float:
        """Seconds that forward and backward would take on a reference, by the blocks' sizes."""
        device, predicted = self.device.type, self.reference.seconds
        total = 0.0
        for index in self._layers:
            size = _size(inputs.blocks[index])
            total += predicted(device, "forward", self._shapes[index], size)
            total += predicted(device, "backward", self._shapes[index], size)
        return total

    def teach(self, model: CostModel, kind: Kind, inputs: MicrobatchInputs, seconds: float) -> None:
        """Let ``model`` learn from the newest action, which took ``seconds``."""
        layers = [(self._shapes[i], _size(inputs.blocks[i]), s) for i, s in self.layer_seconds]
        direction: Direction = "forward" if kind == "F" else "backward"
        model.observe_action(self.device.type, direction, layers, seconds)

    def reset(self) -> None:
        """Forget the step: activations, gradients and losses."""
        self._in_flight.clear()
        self._given.clear()
        self.grads.clear()
        self.losses.clear()

    def forward(
        self,
        step: int,
        microbatch: int,
        inputs: MicrobatchInputs,
        received: Rows | None,
        step_seeds: int,
    ) -> Rows:
        """Run the stage's layers and return the rows for the next stage.

        ``received``: rows of the first layer's sources from the stage before, or None on stage 0.
        ``step_seeds``: seeds of the whole step, by which the loss of the last stage is divided.
        """
        given = _Given(step, inputs, received, step_seeds)
        if not self.recompute:
            return self._forward(microbatch, given)
        self._given[microbatch] = given
        with torch.no_grad():
            outputs = self._forward(microbatch, given)
        del self._in_flight[microbatch]
        return outputs

    def _forward(self, microbatch: int, given: _Given) -> Rows:
        step, inputs, received = given.step, given.inputs, given.received
        flight = self._in_flight[microbatch] = _InFlight()
        state: State
        if received is None:
            state = self._features(inputs)
        else:
            state = _one_or_all(received)
        self.layer_seconds = []
        for index in self._layers:
            began = time.perf_counter()
            state = self._run_layer(step, microbatch, index, inputs, state, flight)
            self._time(index, began)
        outputs = flight.segments[-1].outputs
        if self._is_last:
            flight.loss = _loss(outputs, inputs, given.step_seeds)
            self.losses[microbatch] = float(flight.loss.detach())
        return tuple(t.detach() for t in outputs)

    def backward(self, microbatch: int, received: Rows | None) -> Rows:
        """Run the stage's layers backwards and return the gradients of what it received.

        ``received``: gradients of the forward's float outputs, or None on the last stage.
        """
        if microbatch in self._given:
            self._forward(microbatch, self._given.pop(microbatch))
        flight = self._in_flight.pop(microbatch)
        grads: list[Tensor | None] = [None] * len(self._index)
        if flight.loss is not None:
            received = _loss_gradients(flight.loss, flight.segments[-1].outputs)
        assert received is not None
        self.layer_seconds = []
        for segment in reversed(flight.segments):
            began = time.perf_counter()
            received = self._run_layer_backward(segment, received, grads)
            self._time(segment.layer, began)
        self.grads[microbatch] = grads
        return received

    def _time(self, layer: int, began: float) -> None:
        # A GPU runs behind: these are then the times of its queue, and right only as their sum.
        self.layer_seconds.append((layer, time.perf_counter() - began))

    def _features(self, inputs: MicrobatchInputs) -> State:
        features = inputs.features
        assert features is not None
        dtype = self._engine.compute_dtype
        if isinstance(features, Prepared):
            return features.map(lambda rows: rows.to(dtype))
        if isinstance(features, SparseRows):
            return SparseRows(features.csr, features.values.to(dtype))
        return features.to(dtype)

    def _run_layer(
        self,
        step: int,
        microbatch: int,
        index: int,
        inputs: MicrobatchInputs,
        state: State,
        flight: _InFlight,
    ) -> State:
        key = layer_key(self._seed, step, microbatch, index)
        # A user's layer may draw from torch's own generator: then from the same place everywhere.
        torch.default_generator.manual_seed(key >> 1)
        if torch.cuda.is_available():
            torch.cuda.manual_seed(key >> 1)
        leaves: Rows = ()
        if not isinstance(state, SparseRows | Prepared):
            rows = state if isinstance(state, tuple) else (state,)
            leaves = tuple(
                t.detach().requires_grad_(index > 0 and t.is_floating_point()) for t in rows
            )
            state = _one_or_all(leaves)
        out = self._engine.layer(index)(inputs.blocks[index], state, LayerContext(key, True))
        outputs = out if isinstance(out, tuple) else (out,)
        for tensor in outputs:
            if not isinstance(tensor, Tensor) or tensor.shape[0] != inputs.blocks[index].num_dst:
                shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise DtrainError(
                    f"model: layer {index}: expected rows for {inputs.blocks[index].num_dst} "
                    f"destinations, got {shape}; mend the layer"
                )
        flight.segments.append(_Segment(index, leaves, outputs))
        return _one_or_all(tuple(t.detach() for t in outputs))

    def _run_layer_backward(
        self, segment: _Segment, received: Rows, grads: list[Tensor | None]
    ) -> Rows:
        parameters = [p for p in self._engine.layer(segment.layer).parameters() if p.requires_grad]
        inputs = [t for t in segment.inputs if t.requires_grad]
        floats = [t for t in segment.outputs if t.is_floating_point()]
        outputs = [t for t in floats if t.requires_grad]
        given = [g for t, g in zip(floats, received, strict=True) if t.requires_grad]
        if not outputs or not (parameters or inputs):
            return tuple(torch.zeros_like(t) for t in inputs)
        found = torch.autograd.grad(outputs, [*parameters, *inputs], given, allow_unused=True)
        for parameter, grad in zip(parameters, found, strict=False):
            grads[self._index[id(parameter)]] = grad
        of_inputs = found[len(parameters) :]
        return tuple(
            torch.zeros_like(t) if g is None else g for t, g in zip(inputs, of_inputs, strict=True)
        )


def _size(block: Block) -> BlockSize:
    return BlockSize(block.nnz, block.num_src, block.num_dst)


def _one_or_all(rows: Rows) -> Tensor | Rows:
    return rows[0] if len(rows) == 1 else rows


def _loss(outputs: Sequence[Tensor], inputs: MicrobatchInputs, step_seeds: int) -> Tensor:
    """This microbatch's part of the mean cross-entropy over the step's seeds."""
    assert inputs.labels is not None
    assert inputs.seed_rows is not None
    logits = outputs[0].index_select(0, inputs.seed_rows).float()
    total = functional.cross_entropy(logits, inputs.labels, reduction="sum")
    return total / step_seeds


def _loss_gradients(loss: Tensor, outputs: Rows) -> Rows:
    """Gradients of the loss for the float outputs of the last layer; zeros where it uses none."""
    floats = [t for t in outputs if t.is_floating_point()]
    found = torch.autograd.grad([loss], floats, allow_unused=True)
    return tuple(
        torch.zeros_like(t) if g is None else g for t, g in zip(floats, found, strict=True)
    )
