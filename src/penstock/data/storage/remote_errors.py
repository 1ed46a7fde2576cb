"""Translates HTTP statuses and the errors of storage clients to penstock's own.

TransientError    a retry may succeed: 5xx, 408, 425, 429, throttling, timeouts, connections that break
SourceError       it will not: other 4xx, unknown hosts, invalid certificates, missing credentials
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

from penstock.core.errors import SourceError
from penstock.core.urls import redact_of, redact_url
from penstock.data.storage.retries import TransientError

_TRANSIENT_CODES = {"RequestTimeout", "RequestTimeoutException", "SlowDown", "InternalError", "ServiceUnavailable"}
_CREDENTIALS = {
    "s3": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; FSSPEC_S3_ANON=true for public files",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`; "
    "FSSPEC_GS_TOKEN=anon for public files",
    "az": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "HF_TOKEN, or `hf auth login`",
}
_SAME_AS = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
REFUSED_REDIRECT = (
    ", a redirect, which is not followed: credentials go to the storage's own endpoints; check AWS_ENDPOINT_URL and "
    "AWS_REGION"
)
_TRANSIENT_STATUSES = {408, 425, 429}


def file_changed(url: str) -> SourceError:
    """Return the error for a file that is not the version that was opened."""
    return SourceError(f"{redact_url(url)} was changed since it was opened; open it again")


def http_error(url: str, status: int, code: str = "", wait_s: float = 0.0) -> Exception:
    """Return the error for an HTTP status: a `TransientError` if a retry may succeed."""
    description = f"HTTP {status}" + (f", {code}" if code and code != str(status) else "")
    if status >= 500 or status in _TRANSIENT_STATUSES or code in _TRANSIENT_CODES or "Throttl" in code:
        return TransientError(f"the server answered {description}", wait_s)
    if status in (401, 403):
        return credentials_error(url, description)
    if status in (404, 410):
        return SourceError(f"there is no file {redact_url(url)} ({description})")
    if status in (412, 416):
        return file_changed(url)
    if 300 <= status < 400 and url.startswith("s3"):
        description += REFUSED_REDIRECT
    return SourceError(f"{redact_url(url)} cannot be read: the server answered {description}")


def credentials_error(url: str, description: str) -> SourceError:
    """Return the error for a file that the credentials do not open."""
    scheme = url.partition("://")[0]
    places = _CREDENTIALS.get(_SAME_AS.get(scheme, scheme))
    return SourceError(
        f"{redact_url(url)} may not be read ({description}); check that the credentials are valid for this file"
        + (f": {places}" if places else "")
    )


def translate_error(url: str, error: BaseException) -> Exception:
    """Return penstock's error for one of fsspec, botocore, aiohttp or the operating system."""
    causes = list(_causes(error))
    description = redact_of(url, f"{type(error).__name__}: {error}".removesuffix(": "))
    if any(type(cause).__module__ == "aiohttp.http_exceptions" for cause in causes):
        # A response that was cut or garbled. aiohttp gives these errors the code 400, which no server sent.
        return TransientError(description)
    for cause in causes:
        answered = _answer_error(url, cause)
        if answered is not None:
            return answered
    for cause in causes:
        if isinstance(cause, FileNotFoundError):
            return SourceError(f"there is no file {redact_url(url)}")
        if isinstance(cause, PermissionError):
            return http_error(url, 403, redact_of(url, str(cause)))
        if isinstance(cause, ssl.SSLCertVerificationError):
            return SourceError(f"{redact_url(url)}: the server's certificate is not trusted: {cause}")
        if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
            return SourceError(f"{redact_url(url)}: there is no such host ({cause})")
        if type(cause).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
            return http_error(url, 401, type(cause).__name__)
    if isinstance(error, OSError) or _is_connection_error(error):
        return TransientError(description)
    return SourceError(f"{redact_url(url)} cannot be read: {description}")


def without_secrets(url: str, error: BaseException) -> BaseException | None:
    """Return the error of a library, to be the cause of ours; None if a traceback would show what is secret in it.

    botocore names an endpoint with its user and password.
    """
    texts = map(str, _causes(error))
    return None if any(redact_of(url, text) != text for text in texts) else error


def _answer_error(url: str, cause: BaseException) -> Exception | None:
    """Return the error for an answer of a server that a client's error carries."""
    answer = getattr(cause, "response", None)
    found = getattr(cause, "status_code", None) or getattr(answer, "status_code", None)
    if isinstance(found, int) and 400 <= found < 600:  # of Azure and the Hugging Face Hub
        return http_error(url, found, str(getattr(cause, "error_code", None) or ""))
    if isinstance(answer, dict):  # botocore's ClientError
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0
        code = str(answer.get("Error", {}).get("Code", ""))
        return http_error(url, status or (int(code) if code.isdecimal() else 400), code)
    status = getattr(cause, "status", None) or getattr(cause, "code", None)
    if isinstance(status, int) and 400 <= status < 600:
        return http_error(url, status)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _is_connection_error(error: BaseException) -> bool:
    """Return whether an error of a client is about the connection, and not about the request."""
    passing = {
        "ClientPayloadError",
        "ClientConnectionError",
        "ConnectionError",
        "HTTPClientError",
        "ResponseStreamingError",
        "IncompleteReadError",
        "ResponseParserError",
        "TransportError",  # of httpx and google-auth
        "ServiceRequestError",  # of Azure
        "ServiceResponseError",
    }
    return any(kind.__name__ in passing for kind in type(error).__mro__)
