"""``dtrain bench checkpoint`` measures what it says, on a small state."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from dtrain.cli.main import main


def test_the_report_has_its_keys_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    words = ["bench", "checkpoint", "--megabytes", "2", "--repeats", "1", "--folder", str(tmp_path)]
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
    assert "snapshots" in said["snapshot_reason"]
    assert said["state_bytes"] == pytest.approx(2e6, rel=0.1)
    assert [*tmp_path.iterdir()] == []
    assert torch.get_num_threads() == threads


def test_bad_numbers_and_folders_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["--megabytes", "0"], "--megabytes: expected at least 1, got 0"),
        (["--folder", str(tmp_path / "none")], "cannot be written (No such file or directory)"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["bench", "checkpoint", *words])
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
