"""Reading torchrun's variables, and what a trainer's process is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain import environment
from dtrain.environment import (
    failure_domains,
    grace_s,
    shared_variables,
    trainer_variables,
    worker_place,
)
from dtrain.errors import DtrainError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_the_place_is_torchruns() -> None:
    place = worker_place(TORCHRUN)
    assert (place.worker, place.world_size, place.local_rank) == (3, 4, 1)
    assert (place.store_host, place.store_port, place.host_store) == ("node0", 29500, False)
    assert place.restart == 2


@pytest.mark.parametrize(
    ("rank", "agent", "hosts"),
    [("0", "True", False), ("0", "False", True), ("1", "False", False)],
)
def test_worker_0_hosts_the_store_unless_an_agent_does(rank: str, agent: str, hosts: bool) -> None:
    variables = TORCHRUN | {"RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": agent}
    assert worker_place(variables).host_store is hosts


def test_without_torchrun_there_is_one_worker_on_a_port_of_its_own() -> None:
    place = worker_place({})
    assert (place.worker, place.world_size, place.host_store) == (0, 1, True)
    assert 1024 < place.store_port < 65536


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_PORT": None}, "MASTER_PORT: expected torchrun's value, got none"),
        ({"RANK": "x"}, "RANK: expected a whole number, got 'x'"),
    ],
)
def test_half_an_environment_is_bad_input(change: dict[str, str | None], message: str) -> None:
    variables = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(DtrainError, match=message):
        worker_place(variables)


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_grace_is_seconds(text: str) -> None:
    assert grace_s({}) == 25.0
    assert grace_s({"DTRAIN_GRACE_S": "0.5"}) == 0.5
    with pytest.raises(DtrainError, match="DTRAIN_GRACE_S"):
        grace_s({"DTRAIN_GRACE_S": text})


def test_threads_are_the_runs_and_the_rest_may_be_the_users() -> None:
    given = {"OMP_NUM_THREADS": "7", "MKL_CBWR": "AVX2", "HOME": "/root"}
    variables = trainer_variables(2, given)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    assert [variables[name] for name in names] == ["2"] * 3
    assert variables["MKL_CBWR"] == "AVX2"
    assert trainer_variables(1, {})["MKL_CBWR"] == "AUTO"
    assert trainer_variables(1, {})["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_numba_gets_a_cache_where_the_package_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "NUMBA_CACHE_DIR" not in trainer_variables(1, {})
    package = Path(environment.__file__).resolve().parent
    monkeypatch.setattr(environment.os, "access", lambda path, mode: Path(path) != package)
    variables = trainer_variables(1, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert variables["NUMBA_CACHE_DIR"] == str(tmp_path / "cache" / "dtrain" / "numba")


def test_triton_gets_a_cache_where_home_is_read_only(tmp_path: Path) -> None:
    assert "TRITON_CACHE_DIR" not in trainer_variables(1, {"HOME": str(tmp_path)})
    variables = trainer_variables(1, {"HOME": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)})
    assert variables["TRITON_CACHE_DIR"] == str(tmp_path / "dtrain" / "triton")


def test_failure_domains_end_with_the_node() -> None:
    assert failure_domains("n1", {}) == ("n1",)
    assert failure_domains("n1", {"DTRAIN_FAILURE_DOMAIN": "zone2/rack17/"}) == (
        "zone2",
        "rack17",
        "n1",
    )


def test_workers_of_a_node_share_all_but_who_they_are() -> None:
    other = TORCHRUN | {"RANK": "2", "LOCAL_RANK": "0"}
    assert shared_variables(TORCHRUN) == shared_variables(other)
    assert shared_variables(TORCHRUN)["MASTER_PORT"] == "29500"
    assert shared_variables(TORCHRUN) != shared_variables(TORCHRUN | {"OMP_NUM_THREADS": "2"})
    one, two, none = ({"CUDA_VISIBLE_DEVICES": devices} for devices in ("1", "2", ""))
    assert shared_variables(one) == shared_variables(two) != shared_variables(none)
