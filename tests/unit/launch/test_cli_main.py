"""The console script: quick, plain and with clear exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dtrain.cli import main as cli
from dtrain.launch import torchrun


def test_help_waits_for_no_heavy_import() -> None:
    code = (
        "import sys, dtrain.cli.main as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'numba', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(word in done.stdout for word in ("run", "data", "eval", "env"))


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(torchrun, "launch", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "c.yaml"])
    assert caught.value.code == 130


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_run_ends_with_the_jobs_exit_code(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    seen: list[tuple[list[str], bool]] = []

    def job(arguments: list[str], *, debug: bool) -> int:
        seen.append((arguments, debug))
        return code

    monkeypatch.setattr(torchrun, "launch", job)
    with pytest.raises(SystemExit) as caught:
        cli.main(
            ["--debug", "run", "--nproc-per-node", "4", "c.yaml", "--set", "a.b=--x", "--json"]
        )
    assert caught.value.code == code
    assert seen == [(["--nproc-per-node", "4", "c.yaml", "--set", "a.b=--x", "--json"], True)]


def test_env_names_versions_backends_and_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["env", "--json"])
    assert caught.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"].startswith("2.")
    assert "gloo" in found["backends"]
    for extra in found["missing"]:
        assert extra["get"] == f"pip install 'dtrain[{extra['extra']}]'"
    with pytest.raises(SystemExit):
        cli.main(["env"])
    assert "torch" in capsys.readouterr().out
