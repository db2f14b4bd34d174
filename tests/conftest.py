"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs (``DTRAIN_TEST_DATA``); the test is skipped where it is absent."""
    folder = Path(os.environ.get("DTRAIN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real graphs are not at {folder}; set DTRAIN_TEST_DATA")
    return folder
