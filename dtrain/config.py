"""The run's configuration: one YAML file, checked before anything starts."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from dtrain.deepspeed_options import check_deepspeed
from dtrain.errors import DtrainError
from dtrain.faults.spec import FaultSpec

BUILT_IN_MODELS = ("gcn", "sage", "gat")
_CREDENTIALS = re.compile(r"://[^/@]*:[^@]*@")


class Section(BaseModel):
    """A part of the configuration; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=False, validate_default=True)


class DataConfig(Section):
    """Which graph, and which of its train/val/test splits."""

    store: str
    split: int = Field(0, ge=0)
    cache_dir: str | None = None


class ModelConfig(Section):
    """A built-in model (``gcn``, ``sage``, ``gat``) or the user's own as ``module:attribute``."""

    name: str = "gcn"
    layers: int = Field(2, ge=1)
    hidden: int = Field(64, ge=1)
    dropout: float = Field(0.5, ge=0, lt=1)
    input_dropout: float | None = Field(None, ge=0, lt=1)
    attention_dropout: float | None = Field(None, ge=0, lt=1)
    heads: int = Field(8, ge=1)
    output_heads: int = Field(1, ge=1)
    aggregator: Literal["mean", "max"] = "mean"
    activation: Literal["relu", "elu"] = "relu"
    norm: Literal["none", "layer"] = "none"
    residual: bool = False
    options: dict[str, Any] = Field(default_factory=dict)

    def dropout_of(self, layer: int) -> float:
        """The probability of dropout on the input of a layer."""
        if layer == 0 and self.input_dropout is not None:
            return self.input_dropout
        return self.dropout

    @model_validator(mode="after")
    def _name(self) -> ModelConfig:
        module, _, attribute = self.name.partition(":")
        if self.name not in BUILT_IN_MODELS and not (module and attribute):
            near = difflib.get_close_matches(self.name, BUILT_IN_MODELS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"name: expected {', '.join(BUILT_IN_MODELS)} or module:attribute, "
                f"got {self.name!r}{hint}"
            )
        if self.name in BUILT_IN_MODELS and self.options:
            raise ValueError(
                f"options: {self.name} takes none, got {sorted(self.options)}; they are for a "
                "model given as module:attribute"
            )
        return self


class SamplerConfig(Section):
    """How a microbatch's blocks are drawn."""

    name: Literal["full", "neighbor", "cluster"] = "full"
    fanouts: list[int] = Field(default_factory=list)
    replace: bool = False
    clusters: int = Field(1, ge=1, description="partitions in one microbatch (cluster)")

    @model_validator(mode="after")
    def _fanouts(self) -> SamplerConfig:
        if self.name == "neighbor" and not self.fanouts:
            raise ValueError("fanouts: expected one number for each layer, got none")
        if any(f < 1 and f != -1 for f in self.fanouts):
            raise ValueError(
                f"fanouts: expected numbers of at least 1 (or -1 for all), got {self.fanouts}"
            )
        return self


class TrainConfig(Section):
    """How long and on how many seeds a step trains."""

    max_steps: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)
    batch_size: int | None = Field(None, ge=1, description="seeds in a step; none: all of them")
    weight_decay_layers: list[int] | None = Field(
        None, description="layers that the optimizer's weight_decay applies to; none: all"
    )

    @model_validator(mode="after")
    def _length(self) -> TrainConfig:
        if self.max_steps is None and self.epochs is None:
            raise ValueError("max_steps or epochs: expected at least one of them, got neither")
        return self


def whole_or_auto(value: Any, least: int) -> Any:
    """Check a number that may be ``auto``; of a union pydantic would tell each part's fault."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if value != "auto" and not whole:
        raise ValueError(f"expected a whole number of at least {least}, or auto, got {value!r}")
    return value


class ParallelConfig(Section):
    """How the work is laid out; nothing here but ``microbatches`` changes the result."""

    stages: int | Literal["auto"] = Field(
        1, description="auto: as many as are predicted fastest within memory_mib"
    )
    cuts: list[int] | None = Field(None, description="first layer of each stage after stage 0")
    microbatches: int = Field(4, ge=1)
    redundancy: int = Field(2, ge=1)
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    min_workers: int = Field(1, ge=1)
    spares: int = Field(
        0, ge=0, description="workers that wait, ready, to take the place of one that is lost"
    )
    memory_mib: int | None = Field(
        None, ge=1, description="a worker's memory for states and activations; none: no limit"
    )
    recompute: Literal["auto", "all", "none"] = Field(
        "auto",
        description="activations are computed again in the backward instead of kept; auto: of the "
        "stages for which memory_mib demands it",
    )
    threads_per_worker: int = Field(1, ge=1)
    rebalance: bool = Field(
        True, description="share the work out anew as its costs and workers' speeds are measured"
    )
    record_actions: bool = Field(
        False, description="write the times of every step's actions to the run folder"
    )
    timeout_s: float = Field(300.0, gt=0, description="longest wait for a peer before giving up")

    @field_validator("stages", mode="before")
    @classmethod
    def _stages(cls, value: Any) -> Any:
        return whole_or_auto(value, 1)


_BYTE_UNITS = {
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


class MemoryConfig(Section):
    """How much memory a worker may take for its microbatches."""

    limit: int | None = Field(
        None, ge=1, description="bytes, or a number with MB, GB, MiB, GiB; none: no limit"
    )
    feature_cache: float = Field(
        0.0, ge=0, le=1, description="share of the feature rows that a worker keeps at hand"
    )

    @field_validator("limit", mode="before")
    @classmethod
    def _bytes(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w+)", value)
        if match is None or match[2] not in _BYTE_UNITS:
            raise ValueError(
                f"expected bytes, or a number with {', '.join(_BYTE_UNITS)}, got {value!r}"
            )
        return int(float(match[1]) * _BYTE_UNITS[match[2]])


class CheckpointConfig(Section):
    """Where and how often the run is saved."""

    url: str | None = Field(None, description="fsspec URL; none: RUN_DIR/checkpoints")
    every_steps: int | Literal["auto"] = Field(
        0, description="0: at the end only; auto: by measured cost and failures (Daly's interval)"
    )
    keep: int = Field(3, ge=1, description="newest checkpoints that stay")
    keep_every: int | None = Field(
        None, ge=1, description="checkpoints of steps that are multiples of it stay for good"
    )
    async_save: bool = Field(True, description="save in the background while training goes on")
    strict: bool = Field(
        False, description="a damaged newest checkpoint stops the run; else the next older is taken"
    )

    @field_validator("every_steps", mode="before")
    @classmethod
    def _every(cls, value: Any) -> Any:
        return whole_or_auto(value, 0)

    @model_validator(mode="after")
    def _no_credentials(self) -> CheckpointConfig:
        # The configuration is saved with the run and with each checkpoint.
        if self.url is not None and _CREDENTIALS.search(self.url):
            raise ValueError(
                "url: expected no password in it, got one; give credentials in the environment"
            )
        return self


class RobustConfig(Section):
    """How faults are found and met; nothing here changes the result."""

    respawns: int = Field(
        10, ge=0, description="times that a worker's trainer is started anew in respawn_window_s"
    )
    respawn_window_s: float = Field(600.0, gt=0)
    respawn_backoff_s: float = Field(
        0.0, ge=0, description="wait before the first respawn; grows while trainers die young"
    )
    lease_s: float = Field(5.0, gt=0, description="silence after which a trainer counts as hung")
    progress_s: float = Field(
        120.0,
        ge=0,
        description="longest stay in one action while not waiting for others; 0: no limit",
    )
    wait_s: float = Field(
        300.0, ge=0, description="how long the job waits below parallel.min_workers"
    )
    snapshot_every: int | Literal["auto"] = Field(
        1,
        description="steps between snapshots in peer memory; auto: by measured cost and failures",
    )
    mtbf_s: float = Field(
        86400.0,
        gt=0,
        description="time between faults that is expected before there is any experience (auto)",
    )
    recompute_check: float = Field(
        0.0, ge=0, le=1, description="share of healthy microbatches computed twice and compared"
    )
    on_bad_gradient: Literal["stop", "skip"] = "stop"

    @field_validator("snapshot_every", mode="before")
    @classmethod
    def _every(cls, value: Any) -> Any:
        return whole_or_auto(value, 1)


class EvalConfig(Section):
    """Evaluation while training; a last one always runs at the end."""

    every_epochs: int = Field(0, ge=0)
    select: Literal["last", "best"] = Field(
        "last", description="weights that the final metrics are of: the last, or the best on val"
    )
    metric: Literal["accuracy", "macro_f1", "roc_auc", "loss"] = "accuracy"
    chunk_nodes: int = Field(65536, ge=1, description="rows computed at once in inference")


class Config(Section):
    """The whole configuration of a run."""

    seed: int = Field(0, ge=0)
    data: DataConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    train: TrainConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    robust: RobustConfig = Field(default_factory=RobustConfig)
    deepspeed: dict[str, Any] = Field(
        default_factory=lambda: {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    )
    faults: list[FaultSpec] = Field(
        default_factory=list, description="faults to inject; they must not change the result"
    )

    @model_validator(mode="after")
    def _engine(self) -> Config:
        check_deepspeed(self.deepspeed)
        return self

    @model_validator(mode="after")
    def _shape(self) -> Config:
        layers, par = self.model.layers, self.parallel
        if par.stages == "auto":
            if par.cuts is not None:
                raise ValueError(
                    f"parallel.cuts: expected none with parallel.stages=auto, got {par.cuts}; "
                    "set parallel.stages"
                )
        elif par.stages > layers:
            raise ValueError(
                f"parallel.stages: expected at most model.layers = {layers}, got {par.stages}; "
                "use fewer stages or more layers"
            )
        if par.cuts is not None and par.stages != "auto":
            ok = len(par.cuts) == par.stages - 1 and par.cuts == sorted(set(par.cuts))
            if not ok or any(c < 1 or c >= layers for c in par.cuts):
                raise ValueError(
                    f"parallel.cuts: expected {par.stages - 1} increasing layer numbers in "
                    f"[1, {layers - 1}], got {par.cuts}"
                )
        fanouts = self.sampler.fanouts
        if self.sampler.name == "neighbor" and len(fanouts) != layers:
            raise ValueError(
                f"sampler.fanouts: expected one number for each of model.layers = {layers}, "
                f"got {len(fanouts)}: {fanouts}"
            )
        decay = self.train.weight_decay_layers or []
        if any(not 0 <= layer < layers for layer in decay):
            raise ValueError(
                f"train.weight_decay_layers: expected layers in [0, {layers - 1}], got {decay}"
            )
        for index, fault in enumerate(self.faults):
            if fault.step == "random" and self.train.max_steps is None:
                raise ValueError(
                    f"faults.{index}.step: expected a number where train.max_steps is not set, got "
                    "random; set train.max_steps"
                )
        return self

    def identity(self, dataset_fingerprint: str) -> dict[str, Any]:
        """What decides the result. Two runs with equal identities have equal weights at a step.

        Workers, stages, redundancy, checkpoint and evaluation settings, faults, ZeRO stage and the
        length of the run are not in it and may change when a run is resumed.
        """
        engine = {
            k: v
            for k, v in self.deepspeed.items()
            if k in ("optimizer", "scheduler", "gradient_clipping", "bf16", "fp16")
        }
        return {
            "seed": self.seed,
            "dataset": dataset_fingerprint,
            "split": self.data.split,
            "model": self.model.model_dump(mode="json"),
            "sampler": self.sampler.model_dump(mode="json"),
            "batch_size": self.train.batch_size,
            "weight_decay_layers": self.train.weight_decay_layers,
            "microbatches": self.parallel.microbatches,
            "memory_limit": self.memory.limit,
            "threads_per_worker": self.parallel.threads_per_worker,
            "deepspeed": engine,
        }


def identity_digest(identity: dict[str, Any]) -> str:
    """A short hash of an identity, for comparing runs."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def load_config(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Config:
    """Read and check a YAML config; ``overrides`` are ``section.field=value`` (value in YAML).

    Relative local paths are taken from the working directory and made absolute, so that the saved
    configuration can be used from anywhere. ``deepspeed`` may be a mapping or the path of a
    DeepSpeed JSON file (relative to the config file).

    Raises:
        DtrainError: one line that names the field, what was expected and what came.
    """
    file = Path(path)
    try:
        raw = yaml.safe_load(file.read_text())
    except OSError as error:
        raise DtrainError(f"config {file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DtrainError(f"config {file}: expected text in UTF-8; is it a YAML file?") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise DtrainError(f"config {file}{where}: not valid YAML; mend the file") from error
    if not isinstance(raw, dict):
        raise DtrainError(
            f"config {file}: expected a mapping of sections, got {type(raw).__name__}"
        )
    _read_engine_file(raw, file.parent)
    for override in overrides or []:
        _apply_override(raw, override)
    # An override may have named a file: that one lies where the user stands.
    _read_engine_file(raw, Path())
    _anchor_paths(raw)
    return check_config(raw, str(file))


def check_config(raw: dict[str, Any], origin: str) -> Config:
    """Check a parsed configuration; ``origin`` is named in the message.

    Raises:
        DtrainError: as :func:`load_config`.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise DtrainError(f"config {origin}: {_first_problem(error)}") from error


def _apply_override(raw: dict[str, Any], override: str) -> None:
    path, eq, text = override.partition("=")
    if not eq or not path:
        raise DtrainError(f"--set {override}: expected section.field=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DtrainError(f"--set {override}: the value is not valid YAML") from error
    *sections, last = path.split(".")
    node = raw
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise DtrainError(f"--set {override}: {section} is a value, not a section")
        node = child
    node[last] = value


def _anchor_paths(raw: dict[str, Any]) -> None:
    for section, name in (("data", "store"), ("data", "cache_dir"), ("checkpoint", "url")):
        node = raw.get(section)
        if not isinstance(node, dict):
            continue
        path = node.get(name)
        if isinstance(path, str) and "://" not in path and "::" not in path:
            node[name] = str(Path(path).expanduser().absolute())


def _read_engine_file(raw: dict[str, Any], folder: Path) -> None:
    """Put the DeepSpeed JSON file that ``deepspeed`` names in its place."""
    name = raw.get("deepspeed")
    if not isinstance(name, str):
        return
    path = folder / Path(name).expanduser()
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        raise DtrainError(f"deepspeed: {path} cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise DtrainError(f"deepspeed: {path}, line {error.lineno}: not valid JSON") from error
    if not isinstance(loaded, dict):
        raise DtrainError(f"deepspeed: {path}: expected a JSON object")
    raw["deepspeed"] = loaded


def _first_problem(error: ValidationError) -> str:
    """The first problem of a validation, as ``field: expected ..., got ...``."""
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(problem["loc"][-1]), _field_names(problem["loc"]), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{field}: unknown field{hint}"
    if problem["type"] == "missing":
        return f"{field}: expected a value, got none; set it in the file or with --set {field}=..."
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        # A section's own check names the field, a field's check does not.
        between = ": " if message.startswith("expected") else "."
        return f"{field}{between}{message}" if field else message
    return f"{field}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _field_names(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        if get_origin(annotation) is list:
            (annotation,) = get_args(annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
