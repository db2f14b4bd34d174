"""Cost model: how long a layer takes on a block, fitted to what the layers took."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from dtrain.scheduler.costs import TICKS_PER_S, StepCosts
from dtrain.scheduler.fit import median, robust_fit

Direction = Literal["forward", "backward"]

WINDOW = 256
"""Observations kept for each layer shape, device and direction; older ones have no say."""
_ENOUGH = 12
_OVERHEADS = 64
_FLOAT_BYTES = 4

Coefficients = tuple[float, float, float, float]
"""``a, b, c, d`` of :func:`terms`, in seconds."""

DEFAULTS: Mapping[tuple[str, Direction], Coefficients] = {
    ("cpu", "forward"): (2.0e-9, 1.0e-10, 5.0e-9, 3.0e-4),
    ("cpu", "backward"): (3.0e-9, 2.0e-10, 4.0e-9, 5.0e-4),
    ("cuda", "forward"): (4.0e-12, 2.0e-13, 2.0e-12, 1.5e-4),
    ("cuda", "backward"): (6.0e-12, 4.0e-13, 4.0e-12, 2.5e-4),
}
"""What is taken before there is any measurement: orders of magnitude, by the device's type."""
DEFAULT_SUM_S: Coefficients = (0.0, 0.0, 9.0e-9, 1.0e-3)
"""Exact sum and update of a stage: seconds a byte of parameters, and seconds."""


@dataclass(frozen=True)
class LayerShape:
    """A layer as the cost model sees it; ``kind``: the name of its class.

    ``parameters``: trainable numbers in it.
    """

    kind: str
    fan_in: int
    fan_out: int
    parameters: int = 0


@dataclass(frozen=True)
class BlockSize:
    """A block's edges, source rows and destination rows."""

    nnz: int
    num_src: int
    num_dst: int


def terms(shape: LayerShape, size: BlockSize) -> Coefficients:
    """What the coefficients of ``t = a nnz F + b N Fin Fout + c N F + d`` are multiplied with.

    Edges carry rows of the narrower of both widths, since a linear aggregation commutes with the
    linear map. ``N`` is the destinations in the product with the weights, and the sources in what
    is done to each input row.
    """
    narrow = min(shape.fan_in, shape.fan_out)
    return (
        float(size.nnz * narrow),
        float(size.num_dst * shape.fan_in * shape.fan_out),
        float(size.num_src * shape.fan_in),
        1.0,
    )


_Key = tuple[str, Direction, str, int, int]


class CostModel:
    """Predicts seconds of a layer on a block, from observations of the same run or earlier ones.

    ``device`` is the device's name (``cpu``, or a GPU's model). A layer shape with too few
    observations of its own is predicted from what an earlier run learnt of it, then from all shapes
    of its kind, then from all layers on the device, then from recorded defaults.

    A model is not a pure value: the members of a job must plan with one and the same, for instance
    one that was told as :meth:`learnt`.
    """

    def __init__(self) -> None:
        self._seen: dict[_Key, deque[tuple[Coefficients, float]]] = {}
        self._fits: dict[tuple[object, ...], Coefficients] = {}
        self._priors: dict[_Key, Coefficients] = {}
        self._overheads: deque[float] = deque(maxlen=_OVERHEADS)
        self._sums: deque[tuple[Coefficients, float]] = deque(maxlen=WINDOW)
        self._transfers: deque[tuple[Coefficients, float]] = deque(maxlen=WINDOW)

    def observe(
        self,
        device: str,
        direction: Direction,
        shape: LayerShape,
        size: BlockSize,
        seconds: float,
    ) -> None:
        """Take in that a layer took so long on a block."""
        key = (device, direction, shape.kind, shape.fan_in, shape.fan_out)
        seen = self._seen.setdefault(key, deque(maxlen=WINDOW))
        seen.append((terms(shape, size), seconds))
        self._fits.clear()

    def observe_action(
        self,
        device: str,
        direction: Direction,
        layers: Sequence[tuple[LayerShape, BlockSize, float]],
        seconds: float,
    ) -> None:
        """Take in an action of so many ``seconds``, its layers with the seconds of each.

        What it takes besides its layers counts as theirs, in proportion.
        """
        inside = sum(took for _, _, took in layers)
        for shape, size, took in layers:
            whole = took * seconds / inside if inside > 0 else 0.0
            self.observe(device, direction, shape, size, whole)

    def observe_sum(self, parameter_bytes: int, stages: int, seconds: float) -> None:
        """Take in what the exact sums and updates of a worker's stages took in a step.

        ``parameter_bytes``: of all ``stages`` that it holds.
        """
        self._sums.append(((0.0, 0.0, float(parameter_bytes), float(stages)), seconds))
        self._fits.clear()

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """Take in what passed from the end of an action to the next one's start elsewhere.

        ``num_bytes``: of the rows that the other worker, which had nothing else to do, waited for.
        """
        self._transfers.append(((0.0, 0.0, float(num_bytes), 1.0), seconds))
        self._fits.clear()

    def observe_step(self, predicted_s: float, measured_s: float) -> None:
        """Take in a step's time beside that of its actions, transfers and sums as predicted."""
        self._overheads.append(measured_s - predicted_s)

    @property
    def observations(self) -> int:
        """How many observations of layers there are."""
        return sum(len(seen) for seen in self._seen.values())

    @property
    def overhead_s(self) -> float:
        """What a step takes besides its actions, transfers and sums, at least 0."""
        return max(0.0, median(list(self._overheads))) if self._overheads else 0.0

    @property
    def link(self) -> tuple[float | None, float]:
        """Bytes a second between workers, None where they take no time, and seconds besides."""
        fit = self._fit(("transfer",), list(self._transfers), (0.0, 0.0, 0.0, 0.0))
        return (1.0 / fit[2] if fit[2] > 0 else None), fit[3]

    def seconds(
        self, device: str, direction: Direction, shape: LayerShape, size: BlockSize
    ) -> float:
        """Predicted seconds of a layer on a block."""
        coefficients = self.coefficients(device, direction, shape)
        return _dot(coefficients, terms(shape, size))

    def sum_seconds(self, parameter_bytes: int) -> float:
        """Predicted seconds of the exact sum and the update of that many bytes of parameters."""
        fit = self._fit(("sum",), list(self._sums), DEFAULT_SUM_S)
        return _dot(fit, (0.0, 0.0, float(parameter_bytes), 1.0))

    def coefficients(self, device: str, direction: Direction, shape: LayerShape) -> Coefficients:
        """The fitted ``a, b, c, d`` for a layer, or the recorded defaults."""
        wanted = (device, direction, shape.kind, shape.fan_in, shape.fan_out)
        for width in (5, 3, 2):
            prefix = wanted[:width]
            seen = [o for key, rows in self._seen.items() if key[:width] == prefix for o in rows]
            if len(seen) >= _ENOUGH:
                return self._fit(prefix, seen, None)
            if prefix in self._priors:
                return self._priors[wanted]
        default = DEFAULTS.get((device, direction))
        return default or DEFAULTS["cpu" if device == "cpu" else "cuda", direction]

    def _fit(
        self,
        name: tuple[object, ...],
        seen: Sequence[tuple[Coefficients, float]],
        default: Coefficients | None,
    ) -> Coefficients:
        if default is not None and len(seen) < _ENOUGH:
            return default
        found = self._fits.get(name)
        if found is None:
            fitted = robust_fit([row for row, _ in seen], [seconds for _, seconds in seen])
            a, b, c, d = fitted
            found = self._fits[name] = (a, b, c, d)
        return found

    def learnt(self) -> list[list[Any]]:
        """The coefficients of the layers that were seen often enough, as JSON.

        It has one line a layer shape, device and direction instead of the observations, up to 256
        each, and what is predicted from it for such a layer is the very same.
        """
        found = dict(self._priors)
        for key, seen in self._seen.items():
            if len(seen) >= _ENOUGH:
                device, direction, kind, fan_in, fan_out = key
                shape = LayerShape(kind, fan_in, fan_out)
                found[key] = self.coefficients(device, direction, shape)
        return [[*key, *coefficients] for key, coefficients in sorted(found.items())]

    @classmethod
    def of_learnt(cls, raw: Sequence[Sequence[Any]]) -> CostModel:
        """A model that begins with what :meth:`learnt` told, until it has seen more."""
        model = cls()
        for device, direction, kind, fan_in, fan_out, a, b, c, d in raw:
            model._priors[device, direction, kind, fan_in, fan_out] = (a, b, c, d)
        return model


def step_costs(
    model: CostModel,
    device: str,
    layers: Sequence[LayerShape],
    cuts: Sequence[int],
    sizes: Sequence[Sequence[BlockSize]],
    state_bytes_per_parameter: int = 16,
) -> StepCosts:
    """The costs of a step whose blocks are known.

    ``cuts``: as in a layout. ``sizes[m][l]``: the block of layer ``l`` of microbatch ``m``.
    ``state_bytes_per_parameter``: parameter, gradient and optimizer state (16 for Adam in float32).
    """
    stages = [range(a, b) for a, b in pairwise(cuts)]

    def ticks(direction: Direction) -> tuple[tuple[int, ...], ...]:
        by_layer = [model.coefficients(device, direction, shape) for shape in layers]
        return tuple(
            tuple(
                max(
                    1,
                    round(
                        TICKS_PER_S * sum(_dot(by_layer[i], terms(layers[i], of[i])) for i in run)
                    ),
                )
                for of in sizes
            )
            for run in stages
        )

    counts = [sum(layers[i].parameters for i in run) for run in stages]
    return StepCosts(
        forward=ticks("forward"),
        backward=ticks("backward"),
        sent_bytes=tuple(
            tuple(sent_bytes(layers[run[-1]], of[run[-1]]) for of in sizes) for run in stages
        ),
        kept_bytes=tuple(
            tuple(sum(kept_bytes(layers[i], of[i]) for i in run) for of in sizes) for run in stages
        ),
        state_bytes=tuple(count * state_bytes_per_parameter for count in counts),
        sum_ticks=tuple(
            round(TICKS_PER_S * model.sum_seconds(count * _FLOAT_BYTES)) for count in counts
        ),
        fixed_ticks=round(TICKS_PER_S * model.overhead_s),
    )


def sent_bytes(shape: LayerShape, size: BlockSize) -> int:
    """Bytes of a layer's output rows."""
    return size.num_dst * shape.fan_out * _FLOAT_BYTES


def kept_bytes(shape: LayerShape, size: BlockSize) -> int:
    """Bytes that a layer keeps for its backward.

    Its input before and after dropout, and its output before and after the activation.
    """
    return 2 * _FLOAT_BYTES * (size.num_src * shape.fan_in + size.num_dst * shape.fan_out)


def _dot(coefficients: Coefficients, row: Coefficients) -> float:
    return sum(x * y for x, y in zip(coefficients, row, strict=True))
