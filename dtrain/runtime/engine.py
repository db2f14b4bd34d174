"""The engine of one stage: DeepSpeed's optimizer, ZeRO, precision and learning-rate schedule.

The exact gradient sum is computed outside and is the same on every holder. Where DeepSpeed updates
the parameters themselves it is given as their gradient. Where it keeps other copies of them, of
shards or in float32, the sum enters through a surrogate loss ``sum(p * g)`` with constant ``g``,
whose gradient is ``g`` to the bit. With ZeRO the lowest holder contributes ``g`` and the others
zeros, to a *sum* over the holders: adding zeros is exact, so every shard receives ``g``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.utils import safe_set_full_optimizer_state
from torch import Tensor, nn

from dtrain.deepspeed_options import zero_stage
from dtrain.errors import DtrainError
from dtrain.runtime.comm import Communicator, Reduction
from dtrain.runtime.deepspeed_backend import GenerationBackend, StageTopology, building_engine

_OURS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
_SCHEDULED = ("lr", "betas", "momentum")


def engine_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that DeepSpeed gets: the user's, less what dtrain itself decides."""
    out = {k: copy.deepcopy(v) for k, v in config.items() if k not in _OURS}
    out["train_micro_batch_size_per_gpu"] = 1
    out["gradient_accumulation_steps"] = 1
    out["gradient_clipping"] = 0.0
    out["gradient_allreduce_op"] = "sum"
    out.setdefault("steps_per_print", 1 << 30)
    optimizer = out["optimizer"]
    if str(optimizer["type"]).lower() in ("adam", "adamw"):
        # DeepSpeed's fused Adam would be compiled at first use.
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
        # Adam is Adam: DeepSpeed's own default would make it AdamW.
        decoupled = str(optimizer["type"]).lower() == "adamw"
        optimizer["params"].setdefault("adam_w_mode", decoupled)
    if not zero_stage(out) and (out.get("bf16") or {}).get("enabled"):
        # DeepSpeed's unsharded bfloat16 optimizer hides its float32 masters. Sharded over a group
        # of one, the arithmetic is the same and the masters can be saved.
        out["zero_optimization"] = {**(out.get("zero_optimization") or {}), "stage": 1}
    if zero_stage(out):
        out["zero_allow_untested_optimizer"] = True
    return out


@contextlib.contextmanager
def refusals_told() -> Iterator[None]:
    """What DeepSpeed raises for a configuration that it does not take is the user's to mend."""
    try:
        yield
    except (
        AssertionError,
        AttributeError,
        DeepSpeedConfigError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        said = " ".join(str(error).split()).partition(" For further information")[0]
        raise DtrainError(
            f"deepspeed: DeepSpeed does not take this configuration: {type(error).__name__}: {said}"
        ) from error


class Gathering:
    """Sharded state on its way from a stage's holders; ``tensors`` are whole once it is done."""

    def __init__(self, tensors: dict[str, Tensor], reduction: Reduction | None) -> None:
        self._tensors = tensors
        self._reduction = reduction

    def done(self) -> bool:
        """Whether :meth:`wait` has nothing to wait for."""
        return self._reduction is None or self._reduction.done()

    def wait(self) -> dict[str, Tensor]:
        """The tensors: float32, shaped as the parameters, nobody else's.

        Raises:
            PeerLostError: a holder is gone, or a fault was noticed before it was done.
        """
        if self._reduction is not None:
            self._reduction.wait()
        return self._tensors


class StageEngine:
    """One stage's layers on one holder, with their DeepSpeed engine.

    ``layers`` maps layer numbers to modules, whose parameters are named ``layers.{i}.{name}``
    whatever the stage, so that states saved under one cut load under another.
    """

    def __init__(
        self,
        stage: int,
        layers: Mapping[int, nn.Module],
        config: Mapping[str, Any],
        decay_layers: Sequence[int] | None,
        comm: Communicator,
        backend: GenerationBackend,
        *,
        contributes: bool,
        device: torch.device,
    ) -> None:
        self.stage = stage
        self._device = device
        self.module = nn.Module()
        self.module.layers = nn.ModuleDict({str(i): layer for i, layer in layers.items()})
        self.names = [n for n, p in self.module.named_parameters() if p.requires_grad]
        sharded = zero_stage(config) > 0
        # Without sharding nothing is left for DeepSpeed to exchange: each holder is its own group.
        group = comm.stage_group(stage) if sharded else comm.own_group
        self._comm, self._group = comm, group
        self._contributes = contributes or not sharded
        self._clip = float(config.get("gradient_clipping") or 0.0)
        self._plain = False
        if self.names:
            topology = StageTopology(comm, group)
            with building_engine(backend, topology), refusals_told():
                self._engine, self._optimizer, _, self._scheduler = deepspeed.initialize(
                    model=self.module,
                    model_parameters=self._parameter_groups(decay_layers),
                    config=engine_config(config),
                    mpu=topology,
                    dist_init_required=False,
                )
            # Otherwise it is wrapped, by what keeps shards or float32 copies.
            self._plain = self._engine.optimizer is self._engine.basic_optimizer

    def release(self) -> None:
        """Let go of DeepSpeed's engine, when another has its place.

        The hooks of a sharded optimizer keep it, and through it the generation's groups, alive in a
        cycle through C++ that no garbage collection sees.
        """
        if self.names:
            destroy = getattr(self._optimizer, "destroy", None)
            if destroy is not None:
                destroy()

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters in the order of ``names``."""
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def device(self) -> torch.device:
        """Where the stage computes."""
        return self._device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that the layers compute in: their parameters', float32 if they have none."""
        return next((p.dtype for p in self.parameters), torch.float32)

    def layer(self, index: int) -> nn.Module:
        """The module of layer ``index``."""
        return self.module.layers[str(index)]  # type: ignore[index,return-value]

    def _parameter_groups(self, decay_layers: Sequence[int] | None) -> list[dict[str, Any]]:
        if decay_layers is None:
            return [{"params": self.parameters}]
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                chosen = int(name.split(".")[1]) in decay_layers
                (decayed if chosen else plain).append(parameter)
        groups: list[dict[str, Any]] = []
        if decayed:
            groups.append({"params": decayed})
        if plain:
            groups.append({"params": plain, "weight_decay": 0.0})
        return groups

    def apply(self, grads: Sequence[Tensor], norm: float) -> None:
        """Take one optimizer step with the exact gradient.

        ``grads``: float32, shaped as ``parameters``; ``norm``: their L2 norm over all stages.
        """
        if not self.names:
            return
        scale = 1.0
        if self._clip > 0:
            scale = min(1.0, self._clip / (norm + 1e-6))
        loss = torch.zeros((), device=grads[0].device)
        for parameter, grad in zip(self.parameters, grads, strict=True):
            constant = (grad * scale if scale != 1.0 else grad).to(parameter.dtype)
            if self._plain:
                parameter.grad = constant
                continue
            if not self._contributes:
                constant = torch.zeros_like(constant)
            loss = loss + (parameter * constant).sum()
        if not self._plain:
            self._engine.backward(loss)
        self._engine.step()

    def weights(self) -> dict[str, Tensor]:
        """Copies of the parameters by name."""
        return {n: p.detach().clone() for n, p in zip(self.names, self.parameters, strict=True)}

    def state(self) -> dict[str, Tensor]:
        """Parameters and optimizer state under stage-independent names (collective with ZeRO).

        ``model/{name}``, ``optim/{name}/{key}`` (float32, shaped as the parameter),
        ``optim/{name}/step`` (float32 scalar), and ``master/{name}`` (float32) of parameters of
        another dtype. The live tensors, but for those that are gathered from shards.
        """
        live, gathering = self.begin_state()
        return live | gathering.wait()

    def begin_state(self) -> tuple[dict[str, Tensor], Gathering]:
        """The live tensors of :meth:`state`, and the others on their way.

        Training may go on meanwhile: what is gathered is copied before this returns.
        """
        self._link_shards()
        named = [*zip(self.names, self.parameters, strict=True)]
        out = {f"model/{name}": parameter.detach() for name, parameter in named}
        if not self._sharded:
            state = self._base_optimizer().state if named else {}
            for name, parameter in named:
                out |= {f"optim/{name}/{key}": v for key, v in state.get(parameter, {}).items()}
            return out, Gathering({}, None)
        keys, step = self._shard_state()
        gathered: list[tuple[str, nn.Parameter, str | None]] = [
            (f"optim/{n}/{key}", p, key) for n, p in named for key in keys
        ]
        gathered += [(f"master/{n}", p, None) for n, p in named if p.dtype != torch.float32]
        if step is not None:
            out |= {f"optim/{name}/step": step.clone() for name in self.names}
        return out, self._gather(gathered)

    @property
    def _sharded(self) -> bool:
        """Whether DeepSpeed keeps the optimizer state in flat shards (of one holder, maybe)."""
        return any(hasattr(parameter, "_hp_mapping") for parameter in self.parameters)

    def _shard_state(self) -> tuple[list[str], Tensor | None]:
        """Names of the state that is shaped as the parameters, and the optimizer's step count."""
        keys: set[str] = set()
        step = None
        for kept in self._base_optimizer().state.values():
            for key, value in kept.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    keys.add(key)
                elif key == "step":
                    step = torch.as_tensor(value, dtype=torch.float32)
        return sorted(keys), step

    def _gather(self, wanted: Sequence[tuple[str, nn.Parameter, str | None]]) -> Gathering:
        """Begin to gather sharded state of parameters in one exchange.

        ``wanted``: a name, and the parameter and key of its state (None: the float32 master).
        DeepSpeed's own way is an exchange for each, which takes longer than training a small
        stage. Each holder puts its shard between zeros and adds the bits as integers, so that
        minus zero survives.
        """
        if not wanted:
            return Gathering({}, None)
        sizes = [parameter.numel() for _, parameter, _ in wanted]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self._device)
        pieces = torch.split(flat, sizes)
        for piece, (_, parameter, key) in zip(pieces, wanted, strict=True):
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                place = mapping.lp_fragment_address
                piece.narrow(0, place.start, place.numel).copy_(mapping.get_hp_fragment(key).data)
        tensors = {
            name: piece.view(parameter.shape)
            for piece, (name, parameter, _) in zip(pieces, wanted, strict=True)
        }
        return Gathering(tensors, self._comm.begin_all_reduce(flat.view(torch.int32), self._group))

    def _base_optimizer(self) -> torch.optim.Optimizer:
        inner = getattr(self._optimizer, "optimizer", self._optimizer)
        return inner  # type: ignore[no-any-return]

    def load_optimizer(self, saved: Mapping[str, Tensor]) -> None:
        """Set the optimizer state from entries ``optim/{name}/{key}`` (and ``master/{name}``).

        A parameter without entries keeps a fresh state.
        """
        base = self._base_optimizer() if self.names else None
        if base is None:
            return
        by_name: dict[str, dict[str, Tensor]] = {}
        for entry, value in saved.items():
            section, _, rest = entry.partition("/")
            if section == "optim":
                name, key = rest.rsplit("/", 1)
                by_name.setdefault(name, {})[key] = value
        sharded = self._sharded
        if sharded and by_name:
            self._allocate_shards(base, next(iter(by_name.values())))
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for key, value in by_name.get(name, {}).items():
                if not sharded:
                    base.state[parameter][key] = value.clone()
                elif key != "step":
                    safe_set_full_optimizer_state(parameter, value, key)
            if f"master/{name}" in saved:
                deepspeed.utils.safe_set_full_fp32_param(parameter, saved[f"master/{name}"])

    def _allocate_shards(self, base: torch.optim.Optimizer, example: Mapping[str, Tensor]) -> None:
        """Give every flat shard the state that the optimizer would create at its first step."""
        for group in base.param_groups:
            for shard in group["params"]:
                for key, value in example.items():
                    if key == "step":
                        base.state[shard][key] = value.clone()
                    else:
                        base.state[shard][key] = torch.zeros_like(shard.data)
        self._link_shards()

    def _link_shards(self) -> None:
        """Point every parameter at its piece of the sharded state.

        DeepSpeed does so once, after the first parameter group's first step, when the other
        groups have no state yet.
        """
        linkable = self.names and hasattr(self._optimizer, "_hp_optimizer_states_linked")
        if linkable and any(self._base_optimizer().state.values()):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def schedule_state(self) -> dict[str, Any]:
        """What the learning-rate schedule must remember, as JSON; the same for every stage."""
        if not self.names:
            return {}
        group = self._base_optimizer().param_groups[0]
        scheduler = self._scheduler.state_dict() if self._scheduler is not None else None
        return {"scheduler": scheduler, "group": {k: group[k] for k in _SCHEDULED if k in group}}

    def load_schedule(self, state: Mapping[str, Any]) -> None:
        """Set what :meth:`schedule_state` returned."""
        if not self.names or not state:
            return
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        for group in self._base_optimizer().param_groups:
            for key, value in state["group"].items():
                group[key] = tuple(value) if isinstance(value, list) else value

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._base_optimizer().param_groups[0]["lr"]) if self.names else 0.0
