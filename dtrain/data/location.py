"""Where a store or a source file lies: a plain path or any fsspec URL."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NoReturn

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dtrain.errors import DtrainError

_EXTRA_OF_PROTOCOL = {"s3": "s3", "s3a": "s3"}


@dataclass(frozen=True)
class Location:
    """A folder or file on a file system; ``path`` is in the file system's own form."""

    url: str
    fs: Any
    path: str

    @property
    def is_local(self) -> bool:
        """Whether the files can be memory-mapped where they are."""
        return isinstance(self.fs, LocalFileSystem)

    def join(self, name: str) -> str:
        """Path of ``name`` inside this folder."""
        return os.path.join(self.path, name) if self.is_local else f"{self.path.rstrip('/')}/{name}"

    def exists(self, name: str) -> bool:
        """Whether file ``name`` is in this folder; raises DtrainError when that cannot be told."""
        try:
            # A listing that was cached before another process wrote would hide the file.
            self.fs.invalidate_cache()
            return bool(self.fs.exists(self.join(name)))
        except Exception as error:
            unreadable(f"{self.url}: {name}", error)

    def read_bytes(self, name: str) -> bytes:
        """Content of file ``name``; raises DtrainError when it cannot be read."""
        try:
            return bytes(self.fs.cat_file(self.join(name)))
        except Exception as error:
            unreadable(f"{self.url}: {name}", error)


def locate(url: str) -> Location:
    """Resolve a path or fsspec URL.

    Raises:
        DtrainError: unknown protocol, or one whose library is not installed.
    """
    protocol = url.split("::")[0].split("://")[0] if "://" in url else "file"
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = _EXTRA_OF_PROTOCOL.get(protocol)
        how = f"pip install 'dtrain[{extra}]'" if extra else str(error)
        raise DtrainError(f"{url}: {protocol}:// needs a library that is missing: {how}") from error
    except ValueError as error:
        raise DtrainError(
            f"{url}: expected a path or a URL that fsspec knows, got protocol {protocol!r}"
        ) from error
    return Location(url, fs, path)


def unreadable(what: str, error: Exception) -> NoReturn:
    """Raise the DtrainError for a file that could not be read.

    File systems raise whatever their library raises (credentials, network, permissions), which
    is why callers catch broadly around a single read.
    """
    if isinstance(error, FileNotFoundError):
        raise DtrainError(f"{what}: expected a file, found none; check the path") from error
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    raise DtrainError(f"{what}: cannot be read ({' '.join(str(reason).split())})") from error
