"""Checkpoint URLs: opening the file system behind one, and printing one without its secrets."""

from __future__ import annotations

import re
from typing import Any

from fsspec.core import url_to_fs

from dtrain.errors import DtrainError

# With a colon before the first slash, a password may hold slashes: take all up to the last "@".
_USERINFO = re.compile(r"(?<=://)(?:[^/\s'\"]*:[^\s'\"]*|[^/\s'\"]*)@")
_QUERY = re.compile(r"(://[^?#\s'\"]*)[?#][^\s'\"]*")
_PASSWORD = re.compile(r"://[^/@]*:[^@]*@")
_EXTRAS = {"s3": "s3", "s3a": "s3"}
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs"}


def redact(text: str) -> str:
    """Remove ``user:password@`` and everything after ``?`` or ``#`` from each URL in a text."""
    return _QUERY.sub(r"\1", _USERINFO.sub("", text))


def reason(error: BaseException) -> str:
    """An exception as one line without secrets."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    line = " ".join(redact(text).split())
    return line if line else type(error).__name__


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL or path, and the path in it.

    Nothing is connected to or created. Credentials come from the environment alone.

    Raises:
        DtrainError: the protocol is unknown, its library is not installed, or a password is in
            the URL.
    """
    shown = redact(url)
    if not url.strip():
        raise DtrainError("checkpoint.url: expected a path or an fsspec URL, got an empty text")
    if _PASSWORD.search(url):
        raise DtrainError(
            f"checkpoint.url: expected no password in {shown}, got one; give credentials in the "
            "environment"
        )
    protocol = url.split("://", 1)[0].split("::")[-1] if "://" in url else "file"
    try:
        fs, path = url_to_fs(url)
    except ImportError as error:
        if protocol in _EXTRAS:
            how = f"pip install 'dtrain[{_EXTRAS[protocol]}]'"
        else:
            how = f"pip install {_PACKAGES.get(protocol, f'the fsspec package of {protocol}')}"
        raise DtrainError(
            f"checkpoint.url: {shown} needs a library that is not installed; {how}"
        ) from error
    except ValueError as error:
        raise DtrainError(
            f"checkpoint.url: expected a path or an fsspec URL, got {shown} ({reason(error)})"
        ) from None
    return fs, str(path).rstrip("/") or "/"
