"""The injector: who is struck, when, how often, over all lives; and what each fault does."""

from __future__ import annotations

import errno
import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.config import Config, check_config
from dtrain.errors import DtrainError
from dtrain.faults.actions import InjectedError, spoil
from dtrain.faults.inbox import Inbox
from dtrain.faults.injector import Injector
from dtrain.faults.spec import HOW, FaultSpec
from dtrain.runfolder import RunFolder


def config(*faults: dict[str, Any], **sections: Any) -> Config:
    raw = {"data": {"store": "x"}, "train": {"max_steps": 40}, "faults": list(faults)}
    return check_config(raw | sections, "c.yaml")


def injector(made: Config, folder: Path, worker: int = 0, life: str = "a") -> Injector:
    return Injector.from_config(
        made, worker, life, folder, world_size=4, supervisor_pid=os.getppid()
    )


def events(folder: Path, kind: str = "fault_injected") -> list[dict[str, Any]]:
    return [e for e in RunFolder(folder).events() if e["kind"] == kind]


def steps_struck(one: Injector, steps: range, phase: str = "forward") -> list[int]:
    """The steps in which an exception is injected."""
    found = []
    for step in steps:
        try:
            one.reach(phase, step)
        except InjectedError:
            found.append(step)
    return found


EXCEPTION = {"kind": "crash", "how": "exception"}


@pytest.mark.parametrize(
    ("when", "struck"),
    [
        ({}, [0]),
        ({"step": 7}, [7]),
        ({"step": 7, "count": 3}, [7, 8, 9]),
        ({"step": 7, "count": 3, "every_steps": 5}, [7, 12, 17]),
        ({"step": 7, "until_step": 8, "count": 0}, [7, 8]),
        ({"step": 7, "phase": "backward"}, []),
    ],
)
def test_a_fault_strikes_when_it_is_due(
    tmp_path: Path, when: dict[str, Any], struck: list[int]
) -> None:
    made = config(EXCEPTION | {"worker": 1} | when)
    assert steps_struck(injector(made, tmp_path, worker=0), range(20)) == []
    assert steps_struck(injector(made, tmp_path, worker=1), range(20)) == struck
    assert [e["step"] for e in events(tmp_path)] == struck


def test_a_spent_firing_stays_spent_in_later_lives(tmp_path: Path) -> None:
    made = config(EXCEPTION | {"worker": 1, "count": 2, "every_steps": 4})
    for life, struck in (("a", [0]), ("b", [4]), ("c", []), ("d", [])):
        found = []
        one = injector(made, tmp_path, worker=1, life=life)
        for step in range(20):
            found = steps_struck(one, range(step, step + 1))
            if found:
                break
        assert found == struck
    # Another configuration's faults are other faults.
    changed = config(EXCEPTION | {"worker": 1, "step": 3})
    assert steps_struck(injector(changed, tmp_path, worker=1), range(20)) == [3]


def test_random_choices_are_the_seeds_and_the_same_for_all_workers(tmp_path: Path) -> None:
    drawn = set()
    for seed in range(8):
        made = config(EXCEPTION | {"worker": "random", "step": "random", "seed": seed})
        twice = []
        for trial in ("x", "y"):
            folder = tmp_path / f"{seed}{trial}"
            struck = [steps_struck(injector(made, folder, worker=w), range(40)) for w in range(4)]
            assert sum(len(s) for s in struck) == 1, "exactly one worker, exactly once"
            twice.append(next((w, s[0]) for w, s in enumerate(struck) if s))
        assert twice[0] == twice[1]
        drawn.add(twice[0])
    assert len({worker for worker, _ in drawn}) > 1
    assert len({step for _, step in drawn}) > 4


def test_all_workers_can_be_struck(tmp_path: Path) -> None:
    made = config(EXCEPTION | {"worker": "all", "step": 2})
    assert [steps_struck(injector(made, tmp_path, worker=w), range(9)) for w in range(3)] == [
        [2]
    ] * 3


def test_numeric_faults_change_one_element_and_only_in_their_place(tmp_path: Path) -> None:
    made = config(
        {"kind": "numeric", "worker": 0, "step": 1, "stage": 1, "microbatch": 2},
        {"kind": "numeric", "how": "bitflip", "worker": 0, "step": 3, "phase": "send"},
    )
    one = injector(made, tmp_path)
    tensors = [torch.ones(3, 4), torch.arange(4), torch.ones(0)]

    def bad() -> int:
        return int((tensors[0] != 1).sum())

    for stage, microbatch in ((0, 2), (1, 0)):
        one.reach("sum", 1, stage=stage, microbatch=microbatch, tensors=tensors)
    one.reach("sum", 1, stage=1, microbatch=2)
    assert bad() == 0
    one.reach("sum", 1, stage=1, microbatch=2, tensors=tensors)
    assert int(tensors[0].isnan().sum()) == 1
    tensors[0].fill_(1)
    one.reach("sum", 1, stage=1, microbatch=2, tensors=tensors)
    assert bad() == 0
    one.reach("send", 3, stage=0, microbatch=0, tensors=tensors)
    assert bad() == 1
    assert tensors[1].tolist() == [0, 1, 2, 3]
    assert "inverted" in events(tmp_path, "fault_acted")[1]["reason"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_bit_can_flip(dtype: torch.dtype) -> None:
    class Fixed(random.Random):
        def randrange(self, stop: int, *_: Any) -> int:
            return bit if stop == bits else 0

    bits = 8 * torch.ones(0, dtype=dtype).element_size()
    flipped = set()
    for bit in range(bits):
        tensor = torch.ones(1, dtype=dtype)
        assert spoil("bitflip", [tensor], Fixed()).startswith(f"bit {bit} of element 0 of [1]")
        flipped.add(str(tensor.item()))
    assert len(flipped) == bits
    assert "-1.0" in flipped
    assert "1.0" not in flipped


def test_disk_faults_strike_at_their_point_of_a_save(tmp_path: Path) -> None:
    made = config(
        {"kind": "disk", "how": "full", "worker": 0, "step": 5},
        {"kind": "disk", "how": "rename", "worker": 0, "step": 10},
    )
    one = injector(made, tmp_path)
    for step in (4, 5, 9, 10):
        one.reach("checkpoint", step)
        for point in ("save.begin", "file.flush", "rename"):
            wanted = {(5, "file.flush"): errno.ENOSPC, (10, "rename"): errno.EIO}.get((step, point))
            if wanted is None:
                one.checkpoint_point(point)
            else:
                with pytest.raises(OSError) as caught:
                    one.checkpoint_point(point)
                assert caught.value.errno == wanted


def test_a_partial_write_cuts_the_newest_checkpoint(tmp_path: Path) -> None:
    one = injector(config({"kind": "disk", "how": "partial", "worker": 0}), tmp_path)
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"x" * 100)
        (folder / "manifest.json").write_bytes(b"y" * 10)
        os.utime(folder, (step, step))
    one.checkpoint_point("marker.write")
    sizes = [f.stat().st_size for f in sorted(tmp_path.glob("checkpoints/*/data"))]
    assert sizes == [100, 50]


def test_a_partial_write_needs_a_local_store(tmp_path: Path) -> None:
    made = config({"kind": "disk", "how": "partial", "worker": 0}, checkpoint={"url": "memory://x"})
    with pytest.raises(DtrainError, match=r"expected checkpoint\.url to be a local folder"):
        injector(made, tmp_path)


def test_a_slow_worker_sleeps_in_proportion_for_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    one = injector(
        config({"kind": "slow", "worker": 0, "step": 1, "factor": 3, "seconds": 60}), tmp_path
    )
    one.reach("forward", 0)
    one.after_action(0.5)
    one.reach("forward", 1)
    one.after_action(0.5)
    assert slept == [1.0]
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    one.after_action(0.5)
    assert slept == [1.0]


def test_network_faults_are_shown_to_the_transport(tmp_path: Path) -> None:
    made = config(
        {"kind": "network", "worker": 0, "step": 0},
        {"kind": "network", "how": "oneway", "worker": 0, "step": 1, "to": [2]},
        {"kind": "network", "how": "delay", "worker": 0, "step": 2, "delay_s": 0.5, "seconds": 9},
    )
    one = injector(made, tmp_path)
    assert one.network is None
    seen = []
    for step in range(3):
        one.reach("send", step)
        assert one.network is not None
        seen.append((set(one.network.drop_to), set(one.network.drop_from), one.network.delay_s))
    assert seen == [({1, 2, 3}, {1, 2, 3}, 0), ({2}, set(), 0), (set(), set(), 0.5)]


def test_a_users_own_fault_acts_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    own = {"kind": "own_faults:unplug", "worker": 0, "step": 4, "options": {"port": 8}}
    injector(config(own), tmp_path).reach("vote", 4)
    told = events(tmp_path, "unplugged")[0]
    assert (told["reason"], told["step"]) == ("port 8 in vote", 4)
    injector(config(own), tmp_path / "again").reach("vote", 4)
    assert events(tmp_path / "again", "unplugged")[0]["drawn"] == told["drawn"]
    for kind, message in (("own_faults:PORT", "callable"), ("own_faults:x", "cannot be imported")):
        with pytest.raises(DtrainError, match=message):
            injector(config({"kind": kind, "worker": 0}), tmp_path)


def test_faults_are_handed_to_the_life_they_are_meant_for(tmp_path: Path) -> None:
    one, other = injector(config(), tmp_path), injector(config(), tmp_path, worker=1)
    inbox = Inbox(tmp_path)
    for life in ("a", "earlier"):
        inbox.put(0, life, FaultSpec(kind="crash", how="exception", worker=0))
    struck = []
    for _ in range(40):
        assert steps_struck(other, range(1)) == []
        struck += steps_struck(one, range(1))
        time.sleep(0.005)
    assert struck == [0]
    assert len(events(tmp_path)) == 1
    assert list((tmp_path / "faults" / "inbox").iterdir()) == []


def test_a_reach_without_faults_costs_next_to_nothing(tmp_path: Path) -> None:
    one = injector(config(), tmp_path)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    one.reach("forward", 0)
    sys.setprofile(count)
    for _ in range(100):
        one.reach("forward", 0, stage=1, microbatch=2)
        one.after_action(0.01)
    sys.setprofile(None)
    # reach, its look at the clock and after_action; a poll of the inbox now and then.
    assert calls < 400


def _strike(fault: dict[str, Any], folder: str, ready: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    faulthandler.disable()
    one = injector(config(fault | {"worker": 0}), Path(folder))
    ready.send("ready")
    one.reach("forward", 0)
    ready.send("went on")


@pytest.fixture
def struck(tmp_path: Path) -> Any:
    """Starts a process that a fault strikes: (process, pipe)."""
    started = []

    def start(fault: dict[str, Any]) -> tuple[Any, Any]:
        context = multiprocessing.get_context("fork")
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_strike, args=(fault, str(tmp_path), writer))
        process.start()
        writer.close()
        started.append(process)
        assert reader.poll(30)
        assert reader.recv() == "ready"
        return process, reader

    yield start
    for process in started:
        process.kill()
        process.join()


CODES = {"sigkill": -9, "segfault": -11, "exit0": 0, "exit1": 1, "exception": 1, "oom": -9}


def test_all_crashes_are_tested() -> None:
    assert set(CODES) == set(HOW["crash"])


@pytest.mark.parametrize(("how", "code"), CODES.items())
def test_a_crash_ends_the_process_after_it_was_told(
    struck: Callable[..., Any], tmp_path: Path, how: str, code: int
) -> None:
    process, reader = struck({"kind": "crash", "how": how})
    process.join(60)
    assert process.exitcode == code
    with pytest.raises(EOFError):
        reader.recv()
    assert [(e["how"], e["pid"]) for e in events(tmp_path)] == [(how, process.pid)]
    assert list(Path.cwd().glob("core*")) == []


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize("how", HOW["hang"])
def test_a_hang_stands_still_or_turns_until_its_time_is_over(
    struck: Callable[..., Any], how: str
) -> None:
    process, reader = struck({"kind": "hang", "how": how, "seconds": 2.0})
    before = cpu_ticks(process.pid)
    assert not reader.poll(1.0)
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert (state == "T") == (how == "sigstop")
    if how == "loop":
        assert cpu_ticks(process.pid) > before + 2
    assert reader.poll(30)
    assert reader.recv() == "went on"


def test_a_thread_gets_no_turn_while_the_interpreters_lock_is_held(
    struck: Callable[..., Any],
) -> None:
    process, reader = struck({"kind": "hang", "how": "gil", "seconds": 30})
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGTERM)
    assert not reader.poll(0.5)
    assert process.is_alive()
