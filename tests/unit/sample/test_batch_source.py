"""Microbatches: pure functions of (seed, step, microbatch) that cover every epoch once."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest

from dtrain.config import SamplerConfig
from dtrain.data.batches import BatchSource, MicrobatchSample
from dtrain.errors import DtrainError

LAYERS, MICROBATCHES = 3, 3
SETTINGS = {
    "full": (SamplerConfig(name="full"), None),
    "full batches": (SamplerConfig(name="full"), 17),
    "neighbor": (SamplerConfig(name="neighbor", fanouts=[5, 3, -1]), 17),
    "replace": (SamplerConfig(name="neighbor", fanouts=[2, 3, 4], replace=True), 40),
    "cluster": (SamplerConfig(name="cluster", clusters=2), None),
}


def source(
    store, setting: str, seed: int = 3, microbatches: int = MICROBATCHES, keep: bool = True
) -> BatchSource:
    sampler, batch_size = SETTINGS[setting]
    return BatchSource(
        store,
        split=0,
        sampler=sampler,
        batch_size=batch_size,
        microbatches=microbatches,
        num_layers=LAYERS,
        seed=seed,
        keep=keep,
    )


def digest(sample: MicrobatchSample) -> str:
    arrays = [sample.input_nodes, sample.seeds]
    arrays += [] if sample.seed_rows is None else [sample.seed_rows.numpy()]
    for block in sample.blocks:
        arrays += [block.csr.indptr.numpy(), block.csr.indices.numpy(), block.src_degree.numpy()]
    joined = hashlib.sha256()
    for array in arrays:
        assert array.dtype == np.int64
        joined.update(repr(array.shape).encode() + array.tobytes())
    return joined.hexdigest()


@pytest.mark.parametrize("setting", SETTINGS)
def test_call_order_and_threads_do_not_matter(make_store, setting):
    store = make_store()
    calls = list(product(range(12), range(MICROBATCHES), range(LAYERS)))
    wanted = {call: digest(source(store, setting).sample(*call)) for call in calls}
    shared = source(store, setting)
    shuffled = random.Random(1).sample(calls * 2, len(calls) * 2)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda call: digest(shared.sample(*call)), shuffled))
    assert found == [wanted[call] for call in shuffled]
    if setting != "full":
        assert digest(source(store, setting, seed=4).sample(0, 0)) != wanted[0, 0, 0]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_later_stage_samples_the_same_last_blocks(make_store, setting):
    batches = source(make_store(), setting)
    for step, m in product(range(4), range(MICROBATCHES)):
        whole = batches.sample(step, m)
        assert len(whole.blocks) == LAYERS
        for below, above in zip(whole.blocks[:-1], whole.blocks[1:], strict=True):
            assert below.num_dst == above.num_src
        for first in range(LAYERS):
            part = batches.sample(step, m, first)
            same = MicrobatchSample(
                whole.blocks[first:], part.input_nodes, whole.seed_rows, whole.seeds
            )
            assert digest(part) == digest(same)
            assert part.blocks[0].num_src == len(part.input_nodes)
            assert np.array_equal(part.input_nodes, whole.input_nodes[: len(part.input_nodes)])


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_epoch_has_every_train_node_once(make_store, setting):
    store = make_store()
    batches = source(store, setting)
    epochs = []
    for epoch in range(3):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        assert {batches.epoch_of(step) for step in steps} == {epoch}
        seeds = [[batches.seeds(step, m) for m in range(MICROBATCHES)] for step in steps]
        counts = [sum(map(len, step)) for step in seeds]
        assert counts == [batches.step_seeds(step) for step in steps]
        epochs.append(np.concatenate([s for step in seeds for s in step]))
        assert np.array_equal(np.sort(epochs[-1]), store.split(0).train)
    assert batches.static == (setting == "full")
    assert np.array_equal(epochs[0], epochs[1]) == batches.static


@pytest.mark.parametrize("setting", SETTINGS)
def test_seed_rows_are_the_seeds(make_store, setting):
    batches = source(make_store(), setting)
    for m in range(MICROBATCHES):
        sample = batches.sample(1, m, LAYERS - 1)
        rows = np.arange(len(sample.seeds)) if sample.seed_rows is None else sample.seed_rows
        assert np.array_equal(sample.input_nodes[rows], sample.seeds)
        assert np.array_equal(sample.seeds, batches.seeds(1, m))


def test_short_steps_have_empty_microbatches(make_store):
    store = make_store(num_nodes=58, train_every=3)  # 20 train nodes: 17 and 3
    batches = source(store, "neighbor", microbatches=5)
    assert batches.steps_per_epoch == 2
    assert [len(batches.seeds(0, m)) for m in range(5)] == [4, 4, 3, 3, 3]
    assert [len(batches.seeds(1, m)) for m in range(5)] == [1, 1, 1, 0, 0]
    empty = batches.sample(1, 4)
    assert [(b.num_dst, b.num_src, b.nnz) for b in empty.blocks] == [(0, 0, 0)] * LAYERS
    assert len(empty.input_nodes) == len(empty.seeds) == 0


def test_static_blocks_are_made_once(make_store):
    batches = source(make_store(), "full")
    last = batches.sample(0, 1, 2).blocks
    whole = batches.sample(7, 1).blocks
    again = batches.sample(9, 1, 1).blocks
    assert whole[2] is last[0]
    assert all(a is b for a, b in zip(again, whole[1:], strict=True))


def test_fixed_microbatches_that_are_not_kept_are_the_same_every_time(make_store):
    store = make_store()
    kept, made = source(store, "full"), source(store, "full", keep=False)
    assert not made.static
    for call in product((0, 7), range(MICROBATCHES), range(LAYERS)):
        assert digest(made.sample(*call)) == digest(kept.sample(*call))


def test_blocks_of_steps_and_layers_are_drawn_apart(make_store):
    store = make_store(num_nodes=30, train_every=1)
    sampler = SamplerConfig(name="neighbor", fanouts=[2, 2])
    batches = BatchSource(
        store, split=0, sampler=sampler, batch_size=None, microbatches=1, num_layers=2, seed=1
    )

    def hub_rows(step: int) -> list[list[int]]:
        blocks, nodes = batches.sample(step, 0).blocks, batches.sample(step, 0).input_nodes
        hub = int(np.flatnonzero(nodes == 0)[0])
        picked = []
        for block in blocks:
            a, b = block.csr.indptr[hub], block.csr.indptr[hub + 1]
            picked.append(nodes[block.csr.indices[a:b]].tolist())
        return picked

    rows = [row for step in range(5) for row in hub_rows(step)]
    assert len({tuple(row) for row in rows}) >= 8  # of 435 pairs, so hardly any two are equal


def test_cluster_is_the_induced_subgraph(make_store):
    store = make_store()
    batches = source(store, "cluster")
    offsets = store.meta.partition_offsets
    seen = []
    assert batches.steps_per_epoch == 2  # 7 partitions, 6 in a step
    for step, m in product(range(2), range(MICROBATCHES)):
        sample = batches.sample(step, m)
        assert all(block is sample.blocks[0] for block in sample.blocks)
        nodes = sample.input_nodes.tolist()
        inside = {v: i for i, v in enumerate(nodes)}
        indptr, columns = [0], []
        for v in nodes:
            row = store.indices[store.indptr[v] : store.indptr[v + 1]].tolist()
            columns += [inside[u] for u in row if u in inside]
            indptr.append(len(columns))
        assert sample.blocks[0].csr.indptr.tolist() == indptr
        assert sample.blocks[0].csr.indices.tolist() == columns
        assert np.array_equal(sample.blocks[0].src_degree, np.diff(store.indptr)[nodes])
        seen += [p for p in range(7) if offsets[p] in inside]
    assert sorted(seen) == list(range(7))


def test_a_fresh_process_draws_the_same_blocks(make_store, tmp_path):
    store = make_store()
    np.savez(tmp_path / "graph.npz", indptr=store.indptr, indices=store.indices)
    script = """if True:
        import sys
        from types import SimpleNamespace
        import numpy as np
        from dtrain.config import SamplerConfig
        from dtrain.data.batches import BatchSource
        graph = np.load(sys.argv[1])
        store = SimpleNamespace(
            indptr=graph["indptr"], indices=graph["indices"],
            split=lambda k: SimpleNamespace(train=np.arange(0, 300, 3)),
        )
        sampler = SamplerConfig(name="neighbor", fanouts=[5, 3, -1])
        sample = BatchSource(store, split=0, sampler=sampler, batch_size=17, microbatches=3,
                             num_layers=3, seed=3).sample(8, 1)
        print([block.csr.indices.tolist() for block in sample.blocks])
    """
    printed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "graph.npz")],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stdout
    sample = source(store, "neighbor").sample(8, 1)
    assert printed.strip() == str([block.csr.indices.tolist() for block in sample.blocks])


@pytest.mark.parametrize(
    ("sampler", "batch_size", "words"),
    [
        (SamplerConfig(name="cluster", clusters=8), None, ["sampler.clusters", "--partitions 8"]),
        (SamplerConfig(name="cluster"), 10, ["train.batch_size", "got 10"]),
        (SamplerConfig(name="neighbor", fanouts=[4, 4]), 10, ["sampler.fanouts", "3 layers"]),
    ],
)
def test_settings_that_do_not_fit(make_store, sampler, batch_size, words):
    with pytest.raises(DtrainError) as caught:
        BatchSource(
            make_store(),
            split=0,
            sampler=sampler,
            batch_size=batch_size,
            microbatches=2,
            num_layers=LAYERS,
            seed=0,
        )
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_an_empty_train_split_is_refused(make_store):
    store = make_store()
    store.split(0).train.resize(0, refcheck=False)
    with pytest.raises(DtrainError, match=r"data\.split: .*split 0"):
        source(store, "full")


@pytest.mark.parametrize("call", [(-1, 0, 0), (0, 3, 0), (0, -1, 0), (0, 0, 3)])
def test_calls_out_of_range_are_refused(make_store, call):
    with pytest.raises(IndexError):
        source(make_store(), "neighbor").sample(*call)
