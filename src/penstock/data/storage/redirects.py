"""Redirects of HTTP servers: what says who the user is stays with the server that it is for.

    same origin      scheme, host and port as in the user's URL: all headers, cookies and credentials go along
    another one      the range that is asked for goes along, and nothing of the user's; nor does it on the way back
    an upload        is refused: its bytes are for the server that the user named
    S3               none is followed: what S3 says of a bucket's region, botocore turns into an endpoint of its own

aiohttp by itself sends every header but a few on, and session-wide ones of all kinds; S3's session token is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from penstock.core.errors import ExtraError, SourceError
from penstock.core.urls import redact_url
from penstock.data.optional import need

_MOST = 10
_MAX_PAGE_NBYTES = 64 << 20
_STATUSES = (301, 302, 303, 307, 308)
_HEADERS = {"accept", "accept-encoding", "range", "if-match", "if-range", "user-agent"}
"""What another origin gets of a request's headers."""
_OPTIONS = ("ssl", "proxy", "proxy_auth", "proxy_headers", "timeout", "skip_auto_headers")
"""What a request to another origin keeps of aiohttp's options: how the connection is made."""
_OF_A_SESSION = ("timeout", "auto_decompress", "read_bufsize", "trust_env", "proxy", "proxy_auth")
"""What the session for other origins has of the user's."""


async def open_session(user_get_client: Callable[..., Awaitable[Any]] | None, **options: Any) -> RedirectSession:
    """Return a session for fsspec's HTTP filesystem: its `get_client`.

    Args:
        user_get_client: the user's; None for aiohttp's own.
        options: of `aiohttp.ClientSession`.
    """
    session_class = need("aiohttp", "remote").ClientSession
    session = session_class(**options) if user_get_client is None else await user_get_client(**options)
    plain = {name: options[name] for name in _OF_A_SESSION if name in options}
    stranger = session_class(**plain, connector=session.connector, connector_owner=False)
    return RedirectSession(session, stranger)


class RedirectSession:
    """An `aiohttp.ClientSession` that follows redirects as the module says.

    Args:
        session: the user's, with all that it sends to a server.
        stranger: one that knows nothing of the user, for other origins.
    """

    def __init__(self, session: Any, stranger: Any) -> None:
        self._session = session
        self._stranger = stranger

    def __getattr__(self, name: str) -> Any:
        if name in ("get", "head", "post", "put"):
            return partial(self.request, name)
        return getattr(self._session, name)

    def request(self, method: str, url: Any, **options: Any) -> _Request:
        """Send a request; `await` it, or enter it."""
        if method.upper() == "HEAD":  # of which aiohttp follows redirects only where that is asked for
            options.setdefault("allow_redirects", False)
        return _Request(self._follow(method.upper(), url, options))

    async def close(self) -> None:
        """Close both sessions."""
        await self._stranger.close()
        await self._session.close()

    async def _follow(self, method: str, url: Any, options: dict[str, Any]) -> Any:
        follows, most = options.pop("allow_redirects", True), options.pop("max_redirects", _MOST)
        first = here = url if hasattr(url, "origin") else need("yarl", "remote").URL(url)
        session, count = self._session, 0
        while True:
            response = await session.request(method, here, allow_redirects=False, **options)
            place = response.headers.get("Location")
            if not follows or place is None or response.status not in _STATUSES:
                return _limited(response)
            response.release()
            there = _place_of(first, here, place)
            count += 1
            if method not in ("GET", "HEAD"):
                raise SourceError(
                    f"{redact_url(str(first))}: the server redirects what is written to {redact_url(str(there))}, and "
                    "it goes to no other server than the one that you named; use that URL"
                )
            if count > most:
                raise SourceError(
                    f"{redact_url(str(first))}: the server redirects more than {most} times; check the URL"
                )
            options.pop("params", None)
            if _origin(there) != _origin(first):
                session, options = self._stranger, _without_credentials(options)
            elif session is self._session:
                there = (
                    there.with_user(first.user).with_password(first.password) if first.user else there.with_user(None)
                )
            here = there


class _Request:
    """A request that is under way, as aiohttp returns one."""

    def __init__(self, response: Any) -> None:
        self._coroutine = response
        self._response: Any = None

    def __await__(self) -> Generator[Any, None, Any]:
        found: Generator[Any, None, Any] = self._coroutine.__await__()
        return found

    async def __aenter__(self) -> Any:
        self._response = await self._coroutine
        return await self._response.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self._response.__aexit__(*error)


def origin_of_stranger(url: str, response: Any) -> str:
    """Return where a response came from, if a redirect led to another origin than the URL's; else nothing.

    Args:
        url: that was requested.
        response: aiohttp's.
    """
    there = response.url
    return "" if _origin(there) == _origin(need("yarl", "remote").URL(url)) else str(there.origin())


def without_redirects() -> type[Any]:
    """Return a class of sessions for aiobotocore that returns what redirects, and does not follow.

    Raises:
        ExtraError: aiobotocore is too old.
    """
    base = need("aiobotocore.httpsession", "s3").AIOHTTPSession
    config = need("aiobotocore.config", "s3").AioConfig
    if not hasattr(base, "_get_session") or "http_session_cls" not in inspect.signature(config.__init__).parameters:
        raise ExtraError("a newer aiobotocore is needed to read from S3: pip install --upgrade s3fs aiobotocore")

    async def get_session(self: Any, proxy_url: str | None) -> Any:
        session = await base._get_session(self, proxy_url)

        async def request(*arguments: Any, **options: Any) -> Any:
            return _limited(await session.request(*arguments, allow_redirects=False, **options))

        return SimpleNamespace(request=request)

    return type("SessionWithoutRedirects", (base,), {"_get_session": get_session})


def _limited(response: Any) -> Any:
    """Have a response of aiohttp read whole up to a limit: fsspec and botocore read pages of listings so."""

    async def read() -> bytes:
        page = bytearray()
        try:
            while part := await response.content.readany():
                page += part
                if len(page) > _MAX_PAGE_NBYTES:
                    raise ValueError(f"the server sent a page of more than {_MAX_PAGE_NBYTES} bytes")
        except BaseException:
            response.close()
            raise
        response._body = bytes(page)  # where its own `text` takes it from
        return bytes(page)

    response.read = read
    return response


def _origin(url: Any) -> tuple[str, str, int]:
    return url.scheme, url.host.lower(), url.port


def _place_of(first: Any, here: Any, place: str) -> Any:
    """Return the URL that a redirect leads to.

    Raises:
        SourceError: it is none of the web.
    """
    try:
        there = here.join(need("yarl", "remote").URL(place))
        if there.scheme in ("http", "https") and there.host:
            _origin(there)
            return there
    except ValueError:
        pass
    raise SourceError(
        f"{redact_url(str(first))}: the server redirects to {redact_url(place)!r}, which is no URL of the web"
    )


def _without_credentials(options: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: options[name] for name in _OPTIONS if name in options}
    headers = dict(options.get("headers") or {})
    return {**kept, "headers": {name: value for name, value in headers.items() if name.lower() in _HEADERS}}
