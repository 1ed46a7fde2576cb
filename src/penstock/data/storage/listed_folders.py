"""The folders that one listing by fsspec has listed so far: none is left out, and none is listed twice.

fsspec's `walk`, on which its `find` and `glob` are built, takes a folder for empty if it cannot be listed (asyn.py and
spec.py, on_error="omit"): a server that fails once would cost all files of that folder, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.urls import redact_url
from penstock.data.storage.remote_errors import translate_error, without_secrets
from penstock.data.storage.retries import TransientError


class ListedFolders:
    """Kept between the attempts of one listing: another attempt asks only for the folders that are missing."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Any] = {}
        self._named: dict[str, str] = {}
        self._has_progress = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the filesystems of `list_each_folder` list their folders for this listing in the `with` block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def add(self, key: tuple[str, str], entries: Any) -> None:
        """Keep what a folder holds."""
        self._entries[key] = entries
        folders = (one for one in entries if isinstance(one, dict) and one.get("type") == "directory")
        self._named.update((str(one["name"]).strip("/"), str(one["name"])) for one in folders)
        self._has_progress = True

    def as_named(self, folder: str) -> str:
        """Return a folder as the one above it names it: `walk` drops the slash at its end, which servers may need."""
        return self._named.get(folder.strip("/"), folder)

    def get(self, key: tuple[str, str]) -> Any:
        """Return what a folder holds; None if it has not been listed."""
        return self._entries.get(key)

    @contextmanager
    def translated_errors(self, folder: str) -> Iterator[None]:
        """Raise errors that `walk` lets through: it takes every `OSError` for an empty folder."""
        try:
            yield
        except FileNotFoundError as error:
            if folder.strip("/") not in self._named:
                raise  # nothing says that there is such a folder
            raise SourceError(
                f"the folder {redact_url(folder)} cannot be listed: there is none, although the folder above it names "
                "it; repeat the listing, or name the files"
            ) from error
        except Exception as error:  # noqa: BLE001 - raised again; those of filesystems derive from nothing else
            raise self._translate(folder, error) from without_secrets(folder, error)

    def _translate(self, folder: str, error: Exception) -> Exception:
        found = error if isinstance(error, SourceError | TransientError) else translate_error(folder, error)
        if not isinstance(found, TransientError):
            return found
        reason = "the server did not respond in time" if isinstance(error, TimeoutError) else found.reason
        progress, self._has_progress = self._has_progress, False
        return TransientError(
            f"the folder {redact_url(folder)} cannot be listed: {reason}", found.wait_s, after_progress=progress
        )


_current: ContextVar[ListedFolders | None] = ContextVar("_current", default=None)


def list_each_folder(fs: Any) -> None:
    """Have a filesystem of fsspec raise for a folder that it cannot list, during a listing by `ListedFolders`."""
    if fs.async_impl:
        fs._ls = _listing_async(fs._ls)
    else:
        fs.ls = _listing(fs.ls)


def _listing_async(ls: Callable[..., Any]) -> Callable[..., Any]:
    async def list_folder(path: str, *arguments: Any, **options: Any) -> Any:
        listing, key = _current.get(), (path, repr((arguments, sorted(options.items()))))
        if listing is None:
            return await ls(path, *arguments, **options)
        if listing.get(key) is None:
            with listing.translated_errors(path):
                listing.add(key, await ls(listing.as_named(path), *arguments, **options))
        return listing.get(key)

    return list_folder


def _listing(ls: Callable[..., Any]) -> Callable[..., Any]:
    def list_folder(path: str, *arguments: Any, **options: Any) -> Any:
        listing, key = _current.get(), (path, repr((arguments, sorted(options.items()))))
        if listing is None:
            return ls(path, *arguments, **options)
        if listing.get(key) is None:
            with listing.translated_errors(path):
                listing.add(key, ls(listing.as_named(path), *arguments, **options))
        return listing.get(key)

    return list_folder
