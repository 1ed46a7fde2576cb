"""URLs: their paths, and what messages show of them: no passwords, no signatures, no tokens."""

from __future__ import annotations

import re

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+?(?=[).,;:\]]*(?:[\s'\"<>]|$))", re.IGNORECASE)
_PARAMETER = re.compile(r"([?&][\w.~%-]+=)[^\s'\"<>&]+")
_USER = re.compile(r"[^/?#@]*@|[^/@:\[]*:(?!\d*/)[^@]*@")
"""What stands before the host; keys of S3 have slashes. `host:80/a@b` has none."""


def without_query(url: str) -> str:
    """Return a URL without what follows its path. Outside of the web, a question mark may also be part of a name.

    >>> [without_query(one) for one in ("http://host/a.tar?sig=x", "s3://bucket/a?versionId=1", "s3://bucket/b?.tar")]
    ['http://host/a.tar', 's3://bucket/a', 's3://bucket/b?.tar']
    """
    path, _, query = url.partition("?")
    return path if "://" in path and (url.startswith("http") or "=" in query) else url


def redact_url(url: str) -> str:
    """Return a URL as messages show it: without a password, and without the signature of a signed one.

    >>> redact_url("https://me:secret@host/a.tar?signature=abc")
    'https://host/a.tar?…'
    """
    scheme, separator, rest = url.partition("://")
    user = _USER.match(rest)
    shown = f"{scheme}{separator}{rest[user.end() :] if user else rest}"
    path = without_query(shown)
    return shown if path == shown else f"{path}?…"


def redact(text: str) -> str:
    """Return a text with each URL in it, and what is a URL's without its beginning, as messages show them.

    >>> redact("Cannot connect to 'http://me:pw@host/a?sig=abc' GET /a?sig=abc&x=1")
    "Cannot connect to 'http://host/a?…' GET /a?sig=…&x=…"
    >>> redact("a?b=c.tar is a file here")
    'a?b=c.tar is a file here'
    """
    if "://" not in text:
        return text
    return _PARAMETER.sub(_elide, _URL.sub(lambda found: redact_url(found[0]), text))


def redact_of(url: str, text: str) -> str:
    """Return the text of another library's error about a URL: nothing that is secret in the URL stands in it.

    >>> redact_of("s3://AK:SK@bucket/a", 'Invalid bucket name "AK:SK@bucket"')
    'Invalid bucket name "bucket"'
    """
    rest = url.partition("://")[2]
    user = _USER.match(rest)
    if user and len(user[0]) > 1:
        text = text.replace(user[0], "")
    return _PARAMETER.sub(_elide, redact(text))


def _elide(found: re.Match[str]) -> str:
    return f"{found[1]}…"
