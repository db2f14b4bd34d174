"""Printed URLs hold no credentials."""

from __future__ import annotations

import pytest

from dtrain.checkpoint import redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/tmp/run/checkpoints", "/tmp/run/checkpoints"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("s3://bucket/me@home/key", "s3://bucket/me@home/key"),
        ("ftp://user:pass@host:21/x", "ftp://host:21/x"),
        ("ftp://user:p/a@s@host/x", "ftp://host/x"),
        ("https://host/x?X-Amz-Signature=abc&b=1#frag", "https://host/x"),
        ("simplecache::https://u:p@h/x?t=1", "simplecache::https://h/x"),
        ("at 'https://h/x?t=1' and ftp://token@h/y: no", "at 'https://h/x' and ftp://h/y: no"),
        ("is it a question? yes", "is it a question? yes"),
    ],
)
def test_redact(text: str, shown: str) -> None:
    assert redact(text) == shown
