"""Has filesystems of fsspec raise for a folder that they cannot list.

fsspec's `walk`, on which its `find` and `glob` are built, takes a folder for empty if it cannot be listed (asyn.py and
spec.py, on_error="omit"): a server that fails once would cost all files of that folder, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.urls import redact_url
from penstock.data.storage.remote_errors import translate_error, without_secrets
from penstock.data.storage.retries import TransientError

_named: ContextVar[dict[str, str] | None] = ContextVar("_named", default=None)
"""The folders that a listing has found, as they are named there: `walk` drops the slash at their end, which servers may
need."""


@contextmanager
def listing() -> Iterator[None]:
    """Have a folder missed in the `with` block that the folder above it names and that is not there."""
    token = _named.set({})
    try:
        yield
    finally:
        _named.reset(token)


def raise_folder_errors(fs: Any) -> None:
    """Have a filesystem raise errors that `walk` lets through: it takes every `OSError` for an empty folder."""
    ls = fs._ls if fs.async_impl else fs.ls

    async def list_async(path: str, *arguments: Any, **options: Any) -> Any:
        named = _named.get()
        with _errors_of(path, named or {}):
            return _noted(await ls((named or {}).get(path.strip("/"), path), *arguments, **options), named)

    def list_sync(path: str, *arguments: Any, **options: Any) -> Any:
        named = _named.get()
        with _errors_of(path, named or {}):
            return _noted(ls((named or {}).get(path.strip("/"), path), *arguments, **options), named)

    if fs.async_impl:
        fs._ls = list_async
    else:
        fs.ls = list_sync


def _noted(entries: Any, named: dict[str, str] | None) -> Any:
    if named is not None:
        folders = (str(one["name"]) for one in entries if isinstance(one, dict) and one.get("type") == "directory")
        named.update((name.strip("/"), name) for name in folders)
    return entries


@contextmanager
def _errors_of(folder: str, named: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        if folder.strip("/") not in named:
            raise  # nothing says that there is such a folder
        raise SourceError(
            f"the folder {redact_url(folder)} cannot be listed: there is none, although the folder above it names "
            "it; repeat the listing, or name the files"
        ) from error
    except OSError as error:
        found = translate_error(folder, error)
        if isinstance(found, TransientError):
            reason = "the server did not respond in time" if isinstance(error, TimeoutError) else found.reason
            found = TransientError(f"the folder {redact_url(folder)} cannot be listed: {reason}", found.wait_s)
        raise found from without_secrets(folder, error)
