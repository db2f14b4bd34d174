"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs (``DTRAIN_TEST_DATA``); the test is skipped where it is absent."""
    folder = Path(os.environ.get("DTRAIN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real graphs are not at {folder}; set DTRAIN_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[Any]:
    s3_server = pytest.importorskip("s3_server", reason="moto[server] is not installed")
    server = s3_server.S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(_s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An S3 server (``tests/distributed/s3_server.py``) that holds an empty bucket."""
    s3fs = pytest.importorskip("s3fs")
    for name, value in _s3_server.environment().items():
        monkeypatch.setenv(name, value)
    # fsspec keeps file systems by their arguments, which the environment is not part of.
    s3fs.S3FileSystem.clear_instance_cache()
    _s3_server.reset()
    s3fs.S3FileSystem().mkdir(_s3_server.bucket)
    yield _s3_server
    s3fs.S3FileSystem.clear_instance_cache()
