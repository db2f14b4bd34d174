"""Stores that are not on a local disk."""

from __future__ import annotations

import sys
import uuid

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dtrain.data.ranged import BLOCK_BYTES
from dtrain.data.store import GraphStore
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError


@pytest.fixture
def url():
    """A fresh memory:// URL, emptied afterwards."""
    name = f"memory://stores-{uuid.uuid4().hex}"
    yield f"{name}/g"
    fs = fsspec.filesystem("memory")
    if fs.exists(name):
        fs.rm(name, recursive=True)


@pytest.fixture
def fetched(monkeypatch):
    """Byte ranges that were read from memory:// stores, as (file, start, stop)."""
    ranges = []
    original = MemoryFileSystem.cat_ranges

    def recording(self, paths, starts, ends, *args, **kwargs):
        names = [str(path).rsplit("/", 1)[-1] for path in paths]
        ranges.extend(zip(names, starts, ends, strict=True))
        return original(self, paths, starts, ends, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_ranges", recording)
    return ranges


def test_a_remote_store_equals_a_local_one(tmp_path, url, make_graph):
    graph = make_graph()
    write_store(url, graph, partitions=3)
    write_store(str(tmp_path / "s"), graph, partitions=3)
    local = GraphStore.open(str(tmp_path / "s"))
    remote = GraphStore.open(url, cache_dir=str(tmp_path / "cache"))
    assert remote.fingerprint == local.fingerprint
    np.testing.assert_array_equal(remote.indices, local.indices)
    np.testing.assert_array_equal(remote.split(0).val, local.split(0).val)
    np.testing.assert_array_equal(remote.original_ids(), local.original_ids())
    nodes = np.array([4, 59, 4, 0])
    assert remote.gather_features(nodes).equal(local.gather_features(nodes))
    remote.verify()


def test_sparse_features_come_from_afar(tmp_path, url, make_graph):
    values = np.zeros((60, 40), dtype=np.float32)
    values[np.arange(60), np.arange(60) % 40] = np.arange(1, 61)
    write_store(url, make_graph(features=values))
    rows = GraphStore.open(url, cache_dir=str(tmp_path)).gather_features(np.array([59, 2]))
    assert rows.csr.indices.tolist() == [19, 2]
    assert rows.values.tolist() == [60.0, 3.0]


def test_only_the_blocks_that_are_gathered_are_fetched_and_only_once(
    tmp_path, url, make_graph, fetched
):
    wide = BLOCK_BYTES // 4 // 8
    values = np.arange(60 * wide, dtype=np.float32).reshape(60, wide)
    write_store(url, make_graph(features=values))
    store = GraphStore.open(url, cache_dir=str(tmp_path))
    opened = {start for name, start, _ in fetched if name == "features.npy"}
    assert opened == {0}
    fetched.clear()
    nodes = np.array([41, 20, 41])
    np.testing.assert_array_equal(store.gather_features(nodes).numpy(), values[nodes])
    # Eight rows a block after a header: rows 20 and 41 lie in blocks 2 and 5 alone.
    assert sorted(start // BLOCK_BYTES for _, start, _ in fetched) == [2, 5]
    fetched.clear()
    again = GraphStore.open(url, cache_dir=str(tmp_path))
    np.testing.assert_array_equal(again.gather_features(nodes).numpy(), values[nodes])
    assert fetched == []
    # A row that crosses a block's end needs both.
    np.testing.assert_array_equal(again.gather_features(np.array([31])).numpy(), values[[31]])
    assert sorted(start // BLOCK_BYTES for _, start, _ in fetched) == [3, 4]


def test_a_store_written_anew_is_not_mixed_with_the_cached_one(tmp_path, url, make_graph):
    write_store(url, make_graph(seed=1))
    GraphStore.open(url, cache_dir=str(tmp_path)).gather_features(np.arange(60))
    other = make_graph(seed=2)
    write_store(url, other, overwrite=True)
    rows = GraphStore.open(url, cache_dir=str(tmp_path)).gather_features(np.arange(60))
    np.testing.assert_array_equal(rows.numpy(), other.features.values)


def test_a_truncated_remote_array_is_named(tmp_path, url, make_graph):
    write_store(url, make_graph())
    fs, path = fsspec.core.url_to_fs(url)
    content = fs.cat_file(f"{path}/features.npy")
    fs.pipe_file(f"{path}/features.npy", content[:-4])
    with pytest.raises(DtrainError, match=rf"features.npy: expected {len(content)} bytes"):
        GraphStore.open(url, cache_dir=str(tmp_path))


def test_a_remote_write_that_fails_leaves_nothing(url, make_graph, monkeypatch):
    def broken(self, meta):
        raise RuntimeError("lost")

    monkeypatch.setattr("dtrain.data.writer._Target.commit", broken)
    with pytest.raises(RuntimeError, match="lost"):
        write_store(url, make_graph())
    fs, path = fsspec.core.url_to_fs(url)
    assert list(fs.find(path)) == []


def test_a_missing_remote_store_is_named(tmp_path):
    with pytest.raises(DtrainError, match=r"store memory://none/s: expected meta.json there"):
        GraphStore.open("memory://none/s", cache_dir=str(tmp_path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, url, make_graph):
    write_store(url, make_graph())
    (tmp_path / "file").write_text("")
    with pytest.raises(DtrainError, match=r"data.cache_dir: .*cannot be written"):
        GraphStore.open(url, cache_dir=str(tmp_path / "file"))


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # A protocol that was used before stays registered without importing its library again.
    registered = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(registered, "s3", raising=False)
    with pytest.raises(DtrainError, match=r"pip install 'dtrain\[s3\]'"):
        GraphStore.open("s3://bucket/store")


def test_an_unknown_protocol_is_named():
    with pytest.raises(DtrainError, match="got protocol 'gopher'"):
        GraphStore.open("gopher://host/store")
