"""``dtrain bench checkpoint`` measures what it says, on a small state."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from dtrain.bench.snapshots import _compare
from dtrain.cli.main import main


def test_the_report_has_its_keys_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    words = ["bench", "checkpoint", "--megabytes", "2", "--repeats", "1", "--folder", str(tmp_path)]
    words += ["--snapshot-pairs", "0"]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--json"])
    assert not caught.value.code
    said = json.loads(capsys.readouterr().out)
    for name in (
        "stall_vs_memcpy",
        "stall_vs_dcp_async",
        "slowdown_vs_dcp_async",
        "save_vs_torch_save",
        "load_vs_dcp",
    ):
        assert math.isfinite(said[name]), name
        assert said[name] >= 0, name
    assert said["snapshot_overhead_pct"] is None
    assert said["snapshot"] == {}
    assert said["state_bytes"] == pytest.approx(2e6, rel=0.1)
    assert [*tmp_path.iterdir()] == []
    assert torch.get_num_threads() == threads


def test_bad_numbers_and_folders_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["--snapshot-pairs", "-1"], "--snapshot-pairs: expected at least 0, got -1"),
        (["--megabytes", "0"], "--megabytes: expected at least 1, got 0"),
        (["--folder", str(tmp_path / "none")], "cannot be written (No such file or directory)"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["bench", "checkpoint", "--megabytes", "1", *words])
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_steps_with_a_snapshot_are_compared_with_those_without() -> None:
    """Steps take 100 ms and those after a snapshot 10 more; an epoch's last one is not compared."""
    time, steps = 0.0, []
    for step in range(1, 31):
        seeds = 10 if step % 10 == 0 else 512
        time += (0.11 if step % 3 == 1 else 0.1) * seeds / 512
        steps.append({"step": step, "time": time, "seeds": seeds})
    cost = _compare(steps)
    assert cost.overhead_pct == pytest.approx(10)
    assert cost.interval_pct == pytest.approx((10, 10))
    assert (cost.with_ms, cost.without_ms) == (110, 100)
    assert (cost.with_steps, cost.without_steps) == (8, 18)
