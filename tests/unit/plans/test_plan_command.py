"""``dtrain plan``: what it prints and writes, of configurations and of recorded runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain import planview
from dtrain.cli import main as cli
from dtrain.scheduler import Cluster, Layout, make_plan
from dtrain.scheduler.relayout import replan_or_relayout


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", *words])
    told = capsys.readouterr()
    return int(caught.value.code or 0), told.out, told.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_it_prints_the_grid_holders_memory_and_why(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, str(config_file), "--workers", "3")
    assert code == 0, err
    lines = out.splitlines()
    assert [line[:2] for line in lines[1:4]] == ["w0", "w1", "w2"]
    grid = "".join(lines[1:4])
    assert all(str(m) in grid for m in range(6))
    assert "─" in grid
    assert "═" in grid
    for word in ("stage 0", "stage 1", "holders", "memory MiB", "predicted step", "costs from"):
        assert word in out


def test_json_is_complete_and_its_times_follow_each_other(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, str(config_file), "--workers", "3")
    actions = [a for row in found["actions"].values() for a in row]
    assert len(actions) == 2 * 2 * 6
    for row in found["actions"].values():
        assert all(a["end_ms"] <= b["start_ms"] for a, b in itertools.pairwise(row))
    assert found["predicted_step_ms"] >= found["makespan_ms"] >= found["critical_path_ms"]


def test_the_plan_is_the_one_that_a_run_makes(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout((0, 1, 3), 6)
    ours = make_plan(layout, range(3), 1)
    fixed = [str(config_file), "--workers", "3", "--set", "parallel.rebalance=false"]
    found = as_json(capsys, *fixed)
    assert found["executors"] == [list(runs) for runs in ours.executors]
    for w, row in found["actions"].items():
        order = [(a["kind"], a["stage"], a["microbatch"]) for a in row]
        assert order == [tuple(action) for action in ours.actions[int(w)]]
    assert found["compared_ms"] == {}
    lost = as_json(capsys, *fixed, "--fail", "1")
    after = replan_or_relayout(ours, [0, 2], 2)
    assert lost["executors"] == [list(runs) for runs in after.executors]
    moved = as_json(capsys, str(config_file), "--workers", "3")
    assert "after 8 steps all workers are alike" in moved["reason"]
    assert moved["predicted_step_ms"] < found["predicted_step_ms"]
    long = ["--workers", "3", "--set", "train.max_steps=100000", "--set", "parallel.redundancy=1"]
    best = as_json(capsys, str(config_file), *long)
    assert "after 20 steps" in best["reason"]
    assert "with further holders" in best["reason"]
    assert sum(map(len, best["holders"])) > 3
    limited = as_json(capsys, str(config_file), *long, "--set", "memory.limit=2GB")
    assert "with further holders" in limited["reason"]
    still = as_json(capsys, str(config_file), *long, "--set", "parallel.rebalance=false")
    assert "after" not in still["reason"]


def test_a_searched_plan_is_compared_with_others_and_named_as_such(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, str(config_file), "--workers", "3", "--search")
    assert "searched at once" in found["reason"]
    assert found["predicted_step_ms"] <= found["compared_ms"]["1f1b in arrival order"]
    assert min(found["compared_ms"].values()) == pytest.approx(found["predicted_step_ms"])
    lost = as_json(capsys, str(config_file), "--workers", "3", "--search", "--fail", "1")
    assert lost["workers"] == [0, 2]


def test_workers_have_the_memory_that_the_option_says(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Six microbatches of some 100 kB each, and states of less.
    wide = [str(config_file), "--workers", "2", "--set", "model.hidden=512"]
    roomy = as_json(capsys, *wide)
    assert roomy["over_memory"] == []
    tight = as_json(capsys, *wide, "--memory-mib", "1")
    assert tight["over_memory"] == [0, 1]
    assert "does not fit in the memory of workers [0, 1]" in tight["reason"]
    _, out, _ = run(capsys, *wide, "--memory-mib", "1")
    assert out.count("(too much)") == 2


def test_a_loss_a_slow_worker_and_nodes_change_the_plan(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = as_json(capsys, str(config_file), "--workers", "4")
    lost = as_json(capsys, str(config_file), "--workers", "4", "--fail", "1,2")
    assert lost["workers"] == [0, 3]
    assert lost["generation"] == 2
    assert lost["predicted_step_ms"] > whole["predicted_step_ms"]
    assert "of the throughput with all 4 workers" in lost["reason"]
    slow = as_json(capsys, str(config_file), "--workers", "4", "--slow", "2=5")
    load = {w: sum(runs.count(w) for runs in slow["executors"]) for w in range(4)}
    assert load[2] < min(load[w] for w in (0, 1, 3))
    nodes = as_json(capsys, str(config_file), "--workers", "4", "--per-node", "2")
    assert all({w // 2 for w in held} == {0, 1} for held in nodes["holders"])


def test_the_number_of_stages_is_chosen_within_memory(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = as_json(capsys, str(config_file), "--workers", "2", "--stages", "auto")
    assert "predicted fastest of a run's plans by number of stages" in free["reason"]
    assert free["cuts"] == [0, 3]
    wide = ["--stages", "auto", "--set", "model.hidden=1024", "--set", "parallel.redundancy=1"]
    wide = [str(config_file), "--workers", "3", *wide, "--memory-mib", "35"]
    again = as_json(capsys, *wide)
    assert again["cuts"] == [0, 3]
    assert again["over_memory"] == []
    assert again["reason"].count("stages [0] recompute activations") == 2
    tight = as_json(capsys, *wide, "--set", "parallel.recompute=none")
    assert len(tight["cuts"]) > 2
    assert "(does not fit in memory)" in tight["reason"]
    assert tight["predicted_step_ms"] > again["predicted_step_ms"]
    assert as_json(capsys, str(config_file), "--stages", "3")["cuts"] == [0, 1, 2, 3]


def test_a_recorded_step_is_shown_beside_its_prediction(
    recorded_run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded_run()
    found = as_json(capsys, "--run", folder, "--step", "9")
    assert found["measured_step_ms"] == pytest.approx(found["predicted_step_ms"], rel=0.02)
    code, out, _ = run(capsys, "--run", folder)
    assert code == 0
    predicted, measured = out.index("predicted ("), out.index("measured (")
    assert predicted < measured < out.index("measured step")


def test_costs_are_learnt_from_a_recorded_run(
    config_file: Path, recorded_run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded_run(overhead_s=0.5)
    found = as_json(capsys, str(config_file), "--workers", "2", "--learn", folder)
    assert "the recorded actions of" in found["reason"]
    assert found["predicted_step_ms"] - found["makespan_ms"] == pytest.approx(503, abs=10)


def test_links_are_learnt_from_a_recorded_run_unless_they_are_named(
    config_file: Path, recorded_run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded_run(links=Cluster(latency_s=0.2))
    words = [str(config_file), "--workers", "2", "--learn", folder]
    words += ["--set", "parallel.rebalance=false"]
    assert as_json(capsys, *words)["makespan_ms"] > 400
    slow = as_json(capsys, *words, "--gbit-s", "0.001", "--per-node", "1")
    assert slow["makespan_ms"] > as_json(capsys, *words, "--per-node", "1")["makespan_ms"] + 50


def test_a_trace_has_every_action_of_every_picture(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "trace.json"
    words = [str(config_file), "--workers", "2", "--fail", "1", "--trace", str(target)]
    assert run(capsys, *words)[0] == 0
    events = json.loads(target.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "before",
        "after the loss",
    ]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * 2 * 2 * 6
    assert all(e["dur"] > 0 and e["name"][0] in "FB" for e in spans)


def test_figures_are_drawn_where_matplotlib_is_there(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    svg, png = tmp_path / "plan.svg", tmp_path / "plan.png"
    words = [str(config_file), "--workers", "2", "--svg", str(svg), "--png", str(png)]
    assert run(capsys, *words)[0] == 0
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in svg.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "plan: expected CONFIG or --run"),
        (["CONFIG", "--fail", "9"], "--fail: expected workers 0 to 3, got '9'"),
        (["CONFIG", "--fail", "0,1,2,3"], "--fail: expected at least one worker to stay"),
        (["CONFIG", "--slow", "1=x"], "--slow: expected WORKER=FACTOR"),
        (["CONFIG", "--stages", "7"], "parallel.stages: expected at most model.layers = 3"),
        (["CONFIG", "--svg", "x.png"], "--svg: expected a name that ends in .svg, got x.png"),
        (["CONFIG", "--trace", "/nowhere/x.json"], "--trace /nowhere/x.json: cannot be written"),
        (["--run", "EMPTY"], "no recorded actions"),
    ],
)
def test_bad_input_is_one_line(
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    places = {"CONFIG": str(config_file), "EMPTY": str(tmp_path)}
    code, _, err = run(capsys, *(places.get(word, word) for word in words))
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_without_matplotlib_the_message_says_how_to_get_it(
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    code, _, err = run(capsys, str(config_file), "--png", str(tmp_path / "x.png"))
    assert code == 2
    assert "pip install 'dtrain[plot]'" in err
    assert not (tmp_path / "x.png").exists()


def test_stages_have_colours_of_their_own() -> None:
    assert len({planview.stage_color(s) for s in range(8)}) == 8
