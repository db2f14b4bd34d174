"""Snapshots in peer memory: what is copied, what is sent, what is kept."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint import weights_sha256
from dtrain.errors import PeerLostError
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.snapshots import Changing, Snapshots, copy_changed, joined, parted
from dtrain.runtime.state import Progress, StageState
from dtrain.scheduler.membership import Peer


def state(step: int) -> StageState:
    """Weights that change at each step, and others that do so at every fourth."""
    return StageState(
        {
            "model/w": torch.full((4, 3), float(step)),
            "best/w": torch.full((50,), step // 4 * 1.0),
            "optim/w": torch.full((4, 3), -float(step)),
        },
        Progress(step=step),
    )


def test_only_what_changed_is_copied() -> None:
    live = state(1)
    del live.tensors["optim/w"]
    live.tensors["model/zero"] = torch.tensor([0.0, torch.nan])
    first, same = copy_changed(live, {})
    assert same == set()
    live.tensors["model/w"].add_(1)
    second, same = copy_changed(live, first.tensors)
    assert same == {"best/w", "model/zero"}
    assert second.tensors["best/w"] is first.tensors["best/w"]
    assert bool((first.tensors["model/w"] == 1).all())
    assert bool((second.tensors["model/w"] == 2).all())
    live.tensors["model/zero"].neg_()
    third, same = copy_changed(live, second.tensors)
    assert same == {"best/w", "model/w"}, "0 and -0 differ in their bits"
    assert bool(third.tensors["model/zero"].signbit()[0])
    live.tensors["best/w"] = live.tensors["best/w"].reshape(5, 10)
    assert "best/w" not in copy_changed(live, third.tensors)[1]


def test_what_always_changes_is_not_compared_for_a_while() -> None:
    """And is found again where it has ceased to change."""
    live, changing, before = state(1), Changing(), {}
    del live.tensors["best/w"]
    told = []
    for step in range(40):
        if step < 20:
            live.tensors["model/w"].add_(1)
        copy, same = copy_changed(live, before, changing.names())
        changing.copied({*copy.tensors} - same)
        before = copy.tensors
        told.append(same)
        assert all(torch.equal(before[name], value) for name, value in live.tensors.items())
    assert all("optim/w" in same for same in told[1:])
    assert ["model/w" in same for same in told] == [step >= 32 for step in range(40)]


def test_tensors_are_joined_and_parted() -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "empty": torch.empty(0, 7),
        "ids": torch.arange(5),
        "scalar": torch.tensor(2.5),
        "large": torch.randn(200, 200),
        "narrow": torch.randn(2, 6).bfloat16(),
        "turned": torch.randn(4, 3).t(),
    }
    forms, flat = joined(tensors)
    assert len(flat) == 4
    again = parted(json.loads(json.dumps(forms)), flat)
    assert weights_sha256(again) == weights_sha256(tensors)
    assert parted(*joined({})) == {}


class Mail:
    """The transports of all workers; frames wait until they are let through."""

    def __init__(self) -> None:
        self.boxes: dict[int, dict[Any, tuple[Tensor, ...]]] = {}
        self.held: list[tuple[int, Any, tuple[Tensor, ...]]] = []
        self.hold = False
        self.has_left = True
        self.bytes: list[int] = []

    def of(self, worker: int) -> Any:
        box = self.boxes.setdefault(worker, {})
        return SimpleNamespace(
            send=self._send,
            sent=lambda _: self.has_left,
            has=box.__contains__,
            receive=lambda key, _: box.pop(key),
        )

    def _send(self, to: Peer, key: Any, tensors: list[Tensor]) -> None:
        self.bytes.append(sum(t.nbytes for t in tensors))
        self.held.append((to.worker, key, tuple(tensors)))
        if not self.hold:
            self.let_through()

    def let_through(self) -> None:
        for to, key, tensors in self.held:
            self.boxes[to][key] = tensors
        self.held.clear()


class Cluster:
    """Workers 0 and 1 hold stage 0, 2 and 3 stage 1; two nodes, or what ``nodes`` says."""

    def __init__(
        self,
        every: int = 1,
        nodes: str = "abab",
        holders: Any = ((0, 1), (2, 3)),
        sharded_bytes: int = 1 << 30,
    ) -> None:
        self.sharded_bytes = sharded_bytes
        self.mail = Mail()
        self.nodes, self.every = nodes, every
        self.fault = FaultFlag()
        self.gathered = True
        self.barriers = 0
        self.holdings = [
            SimpleNamespace(engines={}, snapshots={}, progress=Progress()) for _ in nodes
        ]
        self.regroup(holders)

    def regroup(self, holders: Any) -> None:
        self.mail.boxes.clear()
        plan = SimpleNamespace(num_stages=2, workers=range(len(self.nodes)), holders=holders)
        self.snapshots = []
        for worker, mine in enumerate(self.holdings):
            mine.engines = {s: None for s in range(2) if worker in holders[s]}
            mine.begin_state = lambda _, mine=mine: self._begin_state(mine.progress.step)
            config = SimpleNamespace(
                robust=SimpleNamespace(snapshot_every=self.every),
                parallel=SimpleNamespace(timeout_s=30.0),
            )
            generation: Any = SimpleNamespace(
                holdings=mine,
                fault=self.fault,
                comm=SimpleNamespace(all_reduce=self._barrier),
                plan=plan,
                domains={w: (node,) for w, node in enumerate(self.nodes)},
                peers={w: Peer(w, "life") for w in plan.workers},
                around=SimpleNamespace(
                    job=SimpleNamespace(config=config, sharded_bytes=self.sharded_bytes),
                    me=SimpleNamespace(worker=worker),
                    transport=self.mail.of(worker),
                ),
            )
            self.snapshots.append(Snapshots(generation, sharded=True))

    def _barrier(self, _: Tensor) -> None:
        self.barriers += 1

    def _begin_state(self, step: int) -> tuple[StageState, Any]:
        """The state of a step, of which a part comes only when ``gathered`` says so."""
        whole = state(step)
        shards = {"optim/w": whole.tensors.pop("optim/w")}
        return whole, SimpleNamespace(done=lambda: self.gathered, wait=lambda: shards)

    def step(self, to: int, **how: bool) -> None:
        for mine, snapshots in zip(self.holdings, self.snapshots, strict=True):
            mine.progress.step = to
            snapshots.take(**how)

    def collect(self) -> None:
        for snapshots in self.snapshots:
            snapshots.collect()

    def kept(self, worker: int) -> list[tuple[int, int]]:
        return sorted(self.holdings[worker].snapshots)

    def check(self) -> None:
        """Every snapshot has the values of its step, wherever it is."""
        for mine in self.holdings:
            for (step, _), kept in mine.snapshots.items():
                assert weights_sha256(kept.tensors) == weights_sha256(state(step).tensors)
                assert kept.progress.step == step


def test_what_is_small_is_gathered_at_once() -> None:
    for size, kept in ((1 << 30, []), (1 << 20, [(1, 0)])):
        cluster = Cluster(sharded_bytes=size)
        cluster.gathered = False
        cluster.step(1)
        assert [key for key in cluster.kept(0) if key[1] == 0] == kept
        assert cluster.barriers == 4 * len(kept)
        cluster.check()


def test_copies_go_to_a_worker_that_does_not_hold_the_stage() -> None:
    cluster = Cluster()
    for step in range(1, 9):
        cluster.step(step)
    cluster.collect()
    cluster.check()
    stages = [{stage for _, stage in cluster.kept(worker)} for worker in range(4)]
    assert {0} <= stages[2] | stages[3], "of stage 0"
    assert {1} <= stages[0] | stages[1], "of stage 1"
    assert all(len(cluster.kept(w)) == 3 * len(stages[w]) for w in range(4)), "three newest steps"
    full = max(cluster.mail.bytes)
    # The best weights are sent at steps 1, 4 and 8, by the first holders of both stages.
    assert [sent > full - 150 for sent in cluster.mail.bytes[::2]] == [
        step in (1, 4, 8) for step in range(1, 9)
    ]


def test_the_keeper_is_on_another_node_where_there_is_one() -> None:
    cluster = Cluster(nodes="aaab", holders=((0, 1), (1, 2)))
    cluster.step(1)
    cluster.collect()
    assert cluster.kept(3) == [(1, 0), (1, 1)]
    assert cluster.kept(0) == [(1, 0)]


@pytest.mark.parametrize("every", [1, 3])
def test_copies_that_are_late_are_put_together_in_order(every: int) -> None:
    cluster = Cluster(every)
    cluster.mail.hold = True
    for step in range(1, 8):
        cluster.step(step)
    keeper = next(w for w in (2, 3) if cluster.snapshots[w]._keep)
    assert not [step for step, stage in cluster.kept(keeper) if stage == 0]
    cluster.mail.let_through()
    cluster.collect()
    cluster.check()
    expected = [5, 6, 7] if every == 1 else [1, 3, 6]
    assert [step for step, stage in cluster.kept(keeper) if stage == 0] == expected


def test_a_new_generation_makes_them_anew_and_drops_what_has_no_place() -> None:
    cluster = Cluster(every=10)
    for step in range(1, 21):
        cluster.step(step)
    before = cluster.kept(0)
    cluster.regroup(((2, 3), (0, 1)))
    assert cluster.kept(0) == before, "until there are new ones, the old ones count"
    cluster.step(21)
    cluster.collect()
    assert (21, 1) in cluster.kept(0), "the first is not waited for"
    assert all(sent > 200 for sent in cluster.mail.bytes[-2:]), "and it is whole"
    for step in range(22, 42):
        cluster.step(step)
    cluster.collect()
    cluster.check()
    for worker, held in enumerate(({1}, {1}, {0}, {0})):
        kept_for = set(cluster.snapshots[worker]._keep)
        assert {stage for _, stage in cluster.kept(worker)} == held | kept_for


def test_what_is_gone_through_again_is_not_kept() -> None:
    cluster = Cluster()
    for step in range(1, 9):
        cluster.step(step)
    for mine in cluster.holdings:
        mine.progress.step = 2
    cluster.regroup(((0, 1), (2, 3)))
    for step in (3, 4):
        cluster.step(step)
    cluster.collect()
    cluster.check()
    assert {step for w in range(4) for step, _ in cluster.kept(w)} == {3, 4}


def test_one_step_is_taken_once() -> None:
    cluster = Cluster()
    cluster.step(1)
    sent = len(cluster.mail.bytes)
    cluster.step(1, force=True)
    assert len(cluster.mail.bytes) == sent


def test_copies_do_not_pile_up_behind_a_slow_network() -> None:
    cluster = Cluster()
    cluster.step(1)
    cluster.mail.has_left = False
    sent = len(cluster.mail.bytes)
    waiting = threading.Thread(target=cluster.step, args=(2,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert len(cluster.mail.bytes) == sent
    cluster.mail.has_left = True
    waiting.join(30)
    assert len(cluster.mail.bytes) == 2 * sent
    cluster.mail.has_left = False
    cluster.fault.set("worker 3 is gone")
    with pytest.raises(PeerLostError, match="worker 3 is gone"):
        cluster.step(3)


def test_what_is_gathered_while_the_next_step_runs_is_kept_at_its_end() -> None:
    cluster = Cluster(every=2)
    cluster.step(1)
    cluster.gathered = False
    cluster.step(2)
    cluster.collect()
    assert {step for w in range(4) for step, _ in cluster.kept(w)} == {1}
    for snapshots in cluster.snapshots:
        snapshots.leave()
    assert {step for w in range(4) for step, _ in cluster.kept(w)} == {1}, "it is not whole"
    cluster.gathered = True
    cluster.step(3)
    cluster.collect()
    cluster.check()
    assert all((2, stage) in cluster.kept(w) for w, stage in ((0, 0), (3, 1)))
    assert {0, 1} <= {stage for w in range(4) for step, stage in cluster.kept(w) if step == 2}


def test_a_generation_that_ends_in_order_waits_for_what_is_gathered() -> None:
    cluster = Cluster()
    cluster.gathered = False
    cluster.step(1)
    cluster.step(1, force=True)
    cluster.collect()
    cluster.check()
    assert all(cluster.kept(w) for w in range(4))


def test_a_generation_that_breaks_keeps_what_was_gathered_and_drops_the_rest() -> None:
    cluster = Cluster()
    cluster.gathered = False
    cluster.step(1)

    def lost() -> None:
        raise PeerLostError("worker 1 is gone")

    cluster.fault.set("worker 1 is gone")
    cluster.gathered = True
    cluster.snapshots[1]._begun[0].gathering.wait = lost  # type: ignore[method-assign]
    for snapshots in cluster.snapshots:
        snapshots.leave()
    cluster.check()
    assert [len(cluster.kept(w)) for w in range(4)] == [1, 0, 1, 1]
