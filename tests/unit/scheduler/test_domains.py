"""Failure domains, risk, speed and memory as inputs of plans and replans."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.scheduler import Layout, Plan, even_cuts, make_plan, replan
from dtrain.scheduler.costs import Cluster, StepCosts
from dtrain.scheduler.domains import dealt_over_domains, domain_labels


def on_nodes(count: int, per_node: int, nodes_per_rack: int = 2) -> dict[int, tuple[str, ...]]:
    """Workers in rank order on nodes, nodes in racks."""
    return {
        w: (f"rack{w // per_node // nodes_per_rack}", f"node{w // per_node}") for w in range(count)
    }


def check_spread(plan: Plan, cluster: Cluster) -> None:
    """No domain has all copies of a stage where the members are in more than one."""
    labels = domain_labels(cluster, plan.workers)
    for held in plan.holders:
        assert not labels or len({labels[w] for w in held}) > 1


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(2, 16),
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=4), max_size=4),
)
def test_copies_lie_in_two_domains_wherever_there_are_two(
    stages: int, count: int, per_node: int, nodes_per_rack: int, changes: list[set[int]]
) -> None:
    cluster = Cluster(domains=on_nodes(16, per_node, nodes_per_rack))
    members = set(range(count))
    plan = make_plan(Layout(even_cuts(stages, stages), 8), sorted(members), 1, cluster=cluster)
    check_spread(plan, cluster)
    for number, change in enumerate(changes, start=2):
        members = (members ^ change) or {0}
        plan = replan(plan, sorted(members), number, cluster=cluster)
        check_spread(plan, cluster)


def test_a_stage_is_dealt_over_nodes_and_a_replica_stays_on_one() -> None:
    cluster = Cluster(domains=on_nodes(8, 4, 1))
    assert dealt_over_domains(range(8), cluster) == (0, 4, 1, 5, 2, 6, 3, 7)
    plan = make_plan(Layout(even_cuts(4, 4), 8), range(8), 1, cluster=cluster)
    assert [sorted(set(runs)) for runs in plan.executors] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for m in range(8):
        assert len({plan.executors[s][m] // 4 for s in range(4)}) == 1


def test_racks_count_before_nodes_and_one_rack_leaves_nodes() -> None:
    domains = on_nodes(8, 2, 2)
    assert set(domain_labels(Cluster(domains=domains), range(8)).values()) == {
        ("rack0",),
        ("rack1",),
    }
    assert domain_labels(Cluster(domains=domains), range(4))[3] == ("rack0", "node1")
    assert domain_labels(Cluster(domains=domains), range(2)) == {}
    assert domain_labels(Cluster(domains={0: ("a",)}), range(2)) == {}


def test_a_single_copy_is_not_doubled_for_the_sake_of_domains() -> None:
    cluster = Cluster(domains=on_nodes(4, 2))
    plan = make_plan(Layout((0, 1, 2), 4, redundancy=1), range(4), 1, cluster=cluster)
    assert [len(held) for held in plan.holders] == [2, 2]
    alone = Layout(even_cuts(4, 4), 4, redundancy=1)
    assert [len(h) for h in make_plan(alone, range(4), 1, cluster=cluster).holders] == [1] * 4


def test_a_risky_worker_is_the_last_to_become_a_standby_and_gets_less_work() -> None:
    two = Layout(even_cuts(2, 2), 2, redundancy=2)
    old = replace(make_plan(two, range(4), 1), layout=replace(two, redundancy=3))
    assert replan(old, range(4), 2).holders[0] == (0, 1, 2)
    cluster = Cluster(risk={2: 0.1})
    assert replan(old, range(4), 2, cluster=cluster).holders[0] == (0, 1, 3)
    plan = make_plan(Layout((0, 1), 20), range(4), 1, cluster=Cluster(risk={2: 1.0}))
    assert plan.executors[0].count(2) < min(plan.executors[0].count(w) for w in (0, 1, 3))


def test_a_slow_worker_gets_the_share_that_it_finishes_in_time() -> None:
    layout = Layout((0, 1), 40)
    cluster = Cluster(slowness={2: 3.0})
    plan = make_plan(layout, range(4), 1, StepCosts.even(layout), cluster)
    counts = [plan.executors[0].count(w) for w in range(4)]
    assert counts[2] == 4
    assert sum(counts) == 40
    assert max(counts) == 12


def test_no_worker_takes_over_a_stage_that_it_has_no_memory_for() -> None:
    layout = Layout(even_cuts(4, 4), 32, redundancy=1)
    costs = StepCosts(
        ((10,) * 32, (1,) * 32, (1,) * 32, (1,) * 32),
        ((20,) * 32, (2,) * 32, (2,) * 32, (2,) * 32),
        state_bytes=(100, 100, 100, 100),
    )
    old = make_plan(layout, range(8), 1, costs)
    roomy = replan(old, range(7), 2, costs=costs)
    assert any(len(roomy.stages_held(w)) > 1 for w in roomy.workers)
    full = Cluster(memory_bytes=dict.fromkeys(range(8), 150))
    plan = replan(old, range(7), 2, "", costs, full)
    lost = [s for s, held in enumerate(old.holders) if held == (7,)]
    # Only the stage that lost its last holder must go to somebody.
    assert all(
        len(plan.stages_held(w)) == 1 or set(plan.stages_held(w)) & set(lost) for w in plan.workers
    )
