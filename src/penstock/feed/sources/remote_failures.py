"""What a failure of remote storage means: foreign errors and statuses of HTTP, as our own errors.

TransientError    it may be gone the next time: 5xx, 408, 425, 429, throttling, time-outs, connections that break
SourceError       it will not be: 4xx, names and certificates that are wrong, credentials that are missing
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

from penstock.core.errors import SourceError
from penstock.feed.sources.retries import TransientError

_PASSING_CODES = {"RequestTimeout", "RequestTimeoutException", "SlowDown", "InternalError", "ServiceUnavailable"}
_PASSING_STATUS = {408, 425, 429}


def shown(url: str) -> str:
    """Return a URL as messages show it: without a password, and without the signature of a signed one.

    >>> shown("https://me:secret@host/a.tar?signature=abc")
    'https://host/a.tar?…'
    """
    scheme, _, rest = url.partition("://")
    rest, query, _ = rest.partition("?")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}{'?…' if query else ''}"


def changed(url: str) -> SourceError:
    """Return the error for a file that is another one than when it was opened."""
    return SourceError(f"{shown(url)} was changed while it was read; open it again")


def answered(url: str, status: int, code: str = "", wait_s: float = 0.0) -> Exception:
    """Return the error for what a server said: a `TransientError` if it may say something else the next time."""
    said = f"HTTP {status}" + (f", {code}" if code and code != str(status) else "")
    if status >= 500 or status in _PASSING_STATUS or code in _PASSING_CODES or "Throttl" in code:
        return TransientError(f"the server answered {said}", wait_s)
    if status in (401, 403):
        return SourceError(
            f"{shown(url)} may not be read ({said}); check the credentials, and that they are this file's: for S3 "
            "AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; FSSPEC_S3_ANON=true for a public bucket"
        )
    if status in (404, 410):
        return SourceError(f"there is no file {shown(url)} ({said})")
    if status in (412, 416):
        return changed(url)
    return SourceError(f"{shown(url)} cannot be read: the server answered {said}")


def told(url: str, error: BaseException) -> Exception:
    """Return our error for one of fsspec, botocore, aiohttp or the system."""
    causes = list(_causes(error))
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    if any(type(cause).__module__ == "aiohttp.http_exceptions" for cause in causes):
        return TransientError(said)  # an answer cut, or garbled; aiohttp says 400 of them, which no server has said
    for cause in causes:
        answer = getattr(cause, "response", None)
        if isinstance(answer, dict):  # botocore's ClientError
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0
            code = str(answer.get("Error", {}).get("Code", ""))
            return answered(url, status or (int(code) if code.isdecimal() else 400), code)
        status = getattr(cause, "status", None) or getattr(cause, "code", None)
        if isinstance(status, int) and 400 <= status < 600:
            return answered(url, status)
    for cause in causes:
        if isinstance(cause, FileNotFoundError):
            return SourceError(f"there is no file {shown(url)}")
        if isinstance(cause, PermissionError):
            return answered(url, 403, str(cause))
        if isinstance(cause, ssl.SSLCertVerificationError):
            return SourceError(f"{shown(url)}: the server's certificate is not to be trusted: {cause}")
        if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
            return SourceError(f"{shown(url)}: there is no such host ({cause})")
        if type(cause).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
            return answered(url, 401, type(cause).__name__)
    if isinstance(error, OSError) or _is_of_the_connection(error):
        return TransientError(said)
    return SourceError(f"{shown(url)} cannot be read: {said}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _is_of_the_connection(error: BaseException) -> bool:
    """Say whether an error of aiohttp or botocore is one of the connection and not of what was asked."""
    passing = {
        "ClientPayloadError",
        "ClientConnectionError",
        "ConnectionError",
        "HTTPClientError",
        "ResponseStreamingError",
        "IncompleteReadError",
        "ResponseParserError",
    }
    return any(kind.__name__ in passing for kind in type(error).__mro__)
