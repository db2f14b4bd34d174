"""From the configuration to layers, and what is said about a model that cannot be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dtrain.config import ModelConfig
from dtrain.errors import DtrainError
from dtrain.models.build import build_layers

USER_MODEL = """
import torch
from torch import nn

class Mix(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.linear = nn.Linear(fan_in, fan_out)

    def forward(self, block, state, ctx):
        return self.linear(state)[: block.num_dst]

def layers(config, in_features, num_classes):
    return [Mix(in_features, config.hidden), Mix(config.hidden, num_classes)]

def three(config, in_features, num_classes):
    return nn.Sequential(*layers(config, in_features, num_classes), Mix(num_classes, num_classes))

def normed(config, in_features, num_classes):
    return [nn.Sequential(nn.BatchNorm1d(in_features)), nn.BatchNorm1d(num_classes)]

def stateless(config, in_features, num_classes):
    return [nn.BatchNorm1d(4, track_running_stats=False), nn.LayerNorm(4)]

def broken(config, in_features, num_classes):
    raise KeyError("no such option")

def wrong(config, in_features, num_classes):
    return [1, 2]

number = 3

class Models:
    layers = staticmethod(layers)
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write the models to a module of a name that no other test has."""
    name = f"models_of_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(USER_MODEL)
    (tmp_path / f"{name}_bad.py").write_text("import no_such_library")
    (tmp_path / f"{name}_pyg.py").write_text(
        "raise ModuleNotFoundError('No module named torch_geometric', name='torch_geometric')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda rest: f"{name}{rest}"


def flat(config: ModelConfig, seed: int) -> torch.Tensor:
    layers = build_layers(config, 12, 3, seed)
    return torch.cat([p.detach().flatten() for layer in layers for p in layer.parameters()])


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_weights_are_a_function_of_the_seed_alone(name: str) -> None:
    config = ModelConfig(name=name, layers=3, norm="layer", residual=True)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = flat(config, 7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(flat(config, 7), first)
    assert not torch.equal(flat(config, 8), first)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_widths_join_up(name: str, layers: int) -> None:
    built = build_layers(ModelConfig(name=name, layers=layers, hidden=8, heads=2), 12, 3, 0)
    assert len(built) == layers
    assert built[0].in_features == 12
    assert built[-1].out_features == 3
    for left, right in itertools.pairwise(built):
        assert left.out_features == right.in_features


@pytest.mark.parametrize("attribute", [":layers", ":Models.layers"])
def test_user_model_is_built_under_the_seed(
    attribute: str, user_module: Callable[[str], str]
) -> None:
    config = ModelConfig(name=user_module(attribute), hidden=5)
    assert len(build_layers(config, 12, 3, 0)) == 2
    assert torch.equal(flat(config, 7), flat(config, 7))
    assert not torch.equal(flat(config, 7), flat(config, 8))


def test_normalisation_without_running_statistics_is_taken(
    user_module: Callable[[str], str],
) -> None:
    assert len(build_layers(ModelConfig(name=user_module(":stateless")), 4, 4, 0)) == 2


def test_a_module_that_is_not_there_is_named() -> None:
    message = "^model.name: .* cannot be imported .*is it on PYTHONPATH"
    with pytest.raises(DtrainError, match=message):
        build_layers(ModelConfig(name="no_such_module_at_all:f"), 4, 3, 0)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (":layer", r"has no 'layer'; did you mean layers\?"),
        (":number", "expected a callable.*got int"),
        (":three", "expected model.layers = 2 layers, got 3"),
        (":normed", "layer 0 has a BatchNorm1d with running statistics.*norm: layer"),
        (":broken", "failed on .*KeyError: 'no such option'"),
        (":wrong", "expected a sequence of torch.nn.Module, got list of int"),
        ("_bad:f", "cannot be imported .*no_such_library.*PYTHONPATH"),
        ("_pyg:f", r"run pip install 'dtrain\[pyg\]'"),
    ],
)
def test_unfit_user_models_are_refused_in_one_line(
    rest: str, message: str, user_module: Callable[[str], str]
) -> None:
    with pytest.raises(DtrainError, match=f"^model.name: .*{message}") as caught:
        build_layers(ModelConfig(name=user_module(rest)), 4, 3, 0)
    assert "\n" not in str(caught.value)
