"""``dtrain bench kernels --device cuda``: its report, made on the CPU, and its refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dtrain.bench import gpu, traffic
from dtrain.bench.contest import elapsed_s
from dtrain.cli import main as cli
from dtrain.kernels.csr import Csr


def _report(only: str, limit_s: float, say: Callable[[str], None] = print) -> gpu.GpuReport:
    cpu = torch.device("cpu")
    return gpu.measure(
        cpu, "a device", elapsed_s, ["pyg"], 1000, None, 0.0, only, say, limit_s, 1 << 16
    )


def test_every_case_is_measured_beside_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "WIDTHS", (16,))
    said: list[str] = []
    report = _report("", 100.0, said.append)
    shapes = {(row.op, row.shape) for row in report.rows}
    assert {("spmm sum fwd", "F=16"), ("spmm sum fwd", "F=64 bf16")} <= shapes
    assert {("gat fwd+bwd", "8x8"), ("maxk fwd+bwd", "F=16 k=16")} <= shapes
    assert len(report.rows) == len(said) == 12
    assert all(row.same_bits and row.ms > 0 and row.achieved > 0 for row in report.rows)
    peers = {row.op: set(row.ratios) for row in report.rows if row.shape != "F=64 bf16"}
    assert peers["spmm sum fwd+bwd"] == {"cusparse", "pyg: scatter"}
    assert peers["gat fwd+bwd"] == {"pyg: GATConv"}
    assert set(report.as_json()["geomean"]) >= {"spmm sum fwd / cusparse"}
    assert any("of copy" in line for line in report.lines())


def test_what_there_is_no_time_for_is_named() -> None:
    report = _report("spmm max", -1.0)
    assert report.rows == []
    assert report.left_out == [f"spmm max fwd+bwd synthetic F={width}" for width in gpu.WIDTHS]
    assert sum("left out" in line for line in report.lines()) == 3


def test_bytes_of_a_small_product() -> None:
    csr = Csr(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), 2)
    # Three entries of a number, a weight and four items, two results and two row bounds.
    assert traffic.sum_bytes(csr, 4, 4, weighted=True) == 3 * (8 + 4 + 16) + 2 * (16 + 8)
    assert traffic.sum_bytes(csr, 4, 2, weighted=False) == 3 * (8 + 8) + 2 * (8 + 8)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda", "expected a GPU that torch can use, found none"),
        ("tpu", "expected cpu or cuda, got 'tpu'"),
    ],
)
def test_without_the_device_one_line_and_code_2(
    device: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "kernels", "--device", device])
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
