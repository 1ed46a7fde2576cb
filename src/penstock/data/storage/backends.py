"""Clients of remote storage: a file's size and version, ranges of its bytes, listings.

    Http       the session of fsspec's HTTP filesystem
    S3         the same, with requests that the client of s3fs signs, see `s3_backend`
    Hub        the same for hf://, with the listings of huggingface_hub's filesystem
    Azure      adlfs, as any other, and closed in its own loop
    Backend    any other filesystem of fsspec: `cat_file`, with the file's version compared after every range; object
               stores, which answer a request from one version of the object, without that for an object read whole

In which thread their methods run, and which errors they raise: `backend`.
"""

from __future__ import annotations

import asyncio
import urllib.parse
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from penstock.core.errors import ExtraError, SourceError
from penstock.core.urls import redact_of, redact_url
from penstock.data.optional import need
from penstock.data.storage.backend import MAX_READS, Backend, mark_of_server
from penstock.data.storage.event_loop import EventLoopThread
from penstock.data.storage.http_backend import Http
from penstock.data.storage.redirects import open_session, without_redirects
from penstock.data.storage.remote_errors import credentials_error, without_secrets
from penstock.data.storage.s3_backend import S3, aws_session

_READ_NBYTES = 1 << 20
_CONNECTIONS = 2 * MAX_READS
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gs")),
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "az")),
    **dict.fromkeys(("http", "https"), ("aiohttp", "remote")),
    "hf": ("huggingface_hub", "hf"),
}
"""The package that a scheme needs, and the extra that brings it."""


class Azure(Backend):
    """Azure's Blob Storage, through adlfs."""

    def __init__(self, fs: Any, stall_s: float) -> None:
        super().__init__(fs, stall_s)
        # adlfs closes its client in finalizers too, in a loop that there is not: tracebacks when the process ends.
        for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
            if (finalizer.peek() or (None,))[0] is fs:
                finalizer.detach()

    async def _mark(self, url: str) -> str:
        return mark_of_server(str(self._session().url))

    def _session(self) -> Any:
        return self._fs.service_client


class Hub(Http):
    """The Hugging Face Hub: its own filesystem lists, and files are read side by side from the URLs that it serves.

    That filesystem reads one file at a time, knows a file's version from a listing that it keeps, and lists the whole
    folder of a file in each process that opens one.
    """

    def __init__(self, fs: Any, stall_s: float, http_fs: Any) -> None:
        super().__init__(http_fs, stall_s)
        self._hub = fs
        self._thread = ThreadPoolExecutor(1, "penstock remote")

    async def exists(self, url: str) -> bool:
        """Return whether there is a file or a folder."""
        return bool(await self._call(url, "exists", url))

    @asynccontextmanager
    async def _get(self, url: str, start: int, end: int | None) -> AsyncIterator[Any]:
        with self._translate_errors(url):
            place = await self._in_thread(self._hub.resolve_path, url)  # asks the Hub for each repository once
        path = urllib.parse.quote(place.path)
        if hasattr(place, "bucket_id"):
            served = f"{self._hub.endpoint}/buckets/{place.bucket_id}/resolve/{path}"
        else:
            kind = "" if place.repo_type == "model" else f"{place.repo_type}s/"
            revision = urllib.parse.quote(place.revision, safe="")
            served = f"{self._hub.endpoint}/{kind}{place.repo_id}/resolve/{revision}/{path}"
        headers = need("huggingface_hub", "hf").utils.build_hf_headers(token=self._hub.token)
        async with self._get_url(url, served, headers, start, end) as response:
            yield response

    def _path(self, url: str) -> str:
        return url

    async def _mark(self, url: str) -> str:
        return mark_of_server(str(self._hub.endpoint))

    async def _invoke(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._hub.invalidate_cache()
        return await self._in_thread(getattr(self._hub, name), *arguments)

    def _foreign_errors(self) -> tuple[type[Exception], ...]:
        return (Exception,)


def get_backend(loop_thread: EventLoopThread, url: str, stall_s: float) -> Backend:
    """Return the backend for a URL, made once for each thread and configuration. Called in the thread's loop only."""
    fsspec = need("fsspec", "remote")
    scheme = url.partition("://")[0]
    need(*_PACKAGES.get(scheme, ("fsspec", "remote")))
    try:
        fs_class = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ExtraError(f"{redact_url(url)}: {redact_of(url, str(error))}") from error
    except ValueError as error:
        raise SourceError(f"{redact_url(url)}: fsspec knows no {scheme}://") from error
    options = fs_class._get_kwargs_from_urls(url)
    key = (fs_class, repr(sorted(options.items())), stall_s)
    backend: Backend | None = loop_thread.backends.get(key)
    if backend is None:
        if fs_class.async_impl:
            options["asynchronous"] = True
        try:
            backend = _create_backend(fs_class, scheme, options, stall_s)
        except ValueError as error:  # adlfs without an account
            raise credentials_error(url, redact_of(url, str(error))) from without_secrets(url, error)
        loop_thread.backends[key] = backend
    return backend


def _create_backend(fs_class: Any, scheme: str, options: dict[str, Any], stall_s: float) -> Backend:
    options |= {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        options["config_kwargs"] = {
            "max_pool_connections": _CONNECTIONS,
            "http_session_cls": without_redirects(),
            **_user_config(fs_class, "config_kwargs"),
            "retries": {"total_max_attempts": 1},
            "connect_timeout": stall_s,
            "read_timeout": stall_s,
        }
        fs = fs_class(**options)
        fs.retries = 1
        with suppress(need("botocore.exceptions", "s3").BotoCoreError):  # raised again by the first request
            fs.session = fs.session or aws_session(**fs.kwargs)
        return S3(fs, stall_s)
    if scheme in ("http", "https"):
        return Http(_http_fs(fs_class, options, stall_s), stall_s)
    if scheme == "hf":
        http_class = need("fsspec", "remote").get_filesystem_class("https")
        http_options = {"asynchronous": True, "skip_instance_cache": True, "use_listings_cache": False}
        return Hub(fs_class(**options), stall_s, _http_fs(http_class, http_options, stall_s))
    if scheme in ("az", "abfs", "abfss"):
        options["loop"] = asyncio.get_running_loop()  # without one it starts fsspec's thread
        return Azure(fs_class(**options), stall_s)
    return Backend(fs_class(**options), stall_s)


def _http_fs(fs_class: Any, options: dict[str, Any], stall_s: float) -> Any:
    aiohttp = need("aiohttp", "remote")
    options["client_kwargs"] = {
        **_user_config(fs_class, "client_kwargs"),
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s),
        "auto_decompress": False,
        "read_bufsize": _READ_NBYTES,
    }
    get_client = next((one["get_client"] for one in _user_configs(fs_class) if "get_client" in one), None)
    return fs_class(**options, get_client=partial(open_session, get_client))


def _user_config(fs_class: Any, option: str) -> dict[str, Any]:
    """Return the user's values, from fsspec's configuration, for an option that is set here too."""
    return {name: value for one in _user_configs(fs_class) for name, value in one.get(option, {}).items()}


def _user_configs(fs_class: Any) -> list[dict[str, Any]]:
    known = need("fsspec", "remote").config.conf
    protocols = (fs_class.protocol,) if isinstance(fs_class.protocol, str) else fs_class.protocol
    return [known.get(one, {}) for one in protocols]
