"""A whole run that checkpoints to S3, killed and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dtrain.checkpoint import CheckpointStore

pytestmark = pytest.mark.chaos

JOIN_S = 240.0


class Run:
    """``dtrain run`` in a process of its own, with this process's environment."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.log = (folder / "log").open("a")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "dtrain", "run", str(folder / "config.yaml"),
                "--nproc-per-node=2", "--run-dir", str(folder / "run"), "--json",
            ],
            stdout=self.log,
            stderr=self.log,
        )  # fmt: skip

    def steps(self) -> int:
        file = self.folder / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return max((json.loads(line).get("step", 0) for line in lines), default=0)

    def kill(self) -> None:
        """SIGKILL for all processes of the job at once."""
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
        self.log.close()

    def record(self) -> dict[str, Any]:
        self.process.wait(JOIN_S)
        self.log.close()
        assert self.process.returncode == 0, (self.folder / "log").read_text()[-3000:]
        loaded: dict[str, Any] = json.loads((self.folder / "run" / "run.json").read_text())
        return loaded


@pytest.mark.timeout(900)
def test_a_run_killed_whole_resumes_from_s3_to_the_same_bits(
    s3: Any, tmp_path: Path, synthetic: str
) -> None:
    config = {
        "data": {"store": synthetic},
        "model": {"name": "sage", "layers": 2, "hidden": 16},
        "sampler": {"name": "neighbor", "fanouts": [4, 4]},
        "train": {"max_steps": 60, "batch_size": 128},
        "parallel": {"stages": 2, "microbatches": 4},
        "checkpoint": {"every_steps": 3, "keep": 2},
    }
    wanted = Run(tmp_path / "local", config).record()
    url = f"s3://{s3.bucket}/job"
    config["checkpoint"] = {**config["checkpoint"], "url": url}  # type: ignore[dict-item]
    first = Run(tmp_path / "s3", config)
    end = time.monotonic() + JOIN_S
    while first.steps() < 25:
        assert first.process.poll() is None, (tmp_path / "s3" / "log").read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.01)
    first.kill()
    newest = CheckpointStore(url).newest(on_skip=lambda _: None)
    assert newest is not None
    assert newest.step >= 18
    record = Run(tmp_path / "s3", config).record()
    assert record["weights_sha256"] == wanted["weights_sha256"]
    assert record["seeds_trained"] == wanted["seeds_trained"]
    events = (tmp_path / "s3" / "run" / "events.jsonl").read_text()
    assert '"resumed"' in events
    for file in (tmp_path / "s3").rglob("*"):
        if file.is_file():
            assert s3.secret.encode() not in file.read_bytes(), file
