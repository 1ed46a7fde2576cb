"""Signs the URLs of many objects of one S3 bucket: Signature Version 4, in the query.

botocore takes ten times as long, because for each URL it looks up the endpoint, the account and the rules anew. So it
signs one URL for each bucket; the others are made like that one, if that one comes out the same here. Described in
AWS's "Authenticating requests: using query parameters".
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import urllib.parse
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

PROBE = "penstock-probe"
"""The key of the object whose URL botocore signs."""

PLAIN_KEY = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
"""Keys that stand in a URL as they are."""

_ALGORITHM = "AWS4-HMAC-SHA256"
_TIME = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True, slots=True)
class UrlSigner:
    """How the URLs of a bucket begin, and for whom they are signed."""

    before_key: str
    host: str
    path: str
    region: str
    service: str
    expires_s: str

    @classmethod
    def like(cls, signed: str, headers: dict[str, str], credentials: Any) -> UrlSigner | None:
        """Return the signer that signs `PROBE` as it is signed; None if there is more to it than is known here."""
        before_key, _, query = signed.partition(f"{PROBE}?")
        found = dict(urllib.parse.parse_qsl(query))
        try:
            region, service = found["X-Amz-Credential"].split("/")[-3:-1]
            place = urllib.parse.urlsplit(before_key)
            made = cls(before_key, place.netloc, place.path, region, service, found["X-Amz-Expires"])
            same = made.sign(PROBE, headers, credentials, found["X-Amz-Date"])
        except (KeyError, ValueError):
            return None
        return made if dict(urllib.parse.parse_qsl(same.partition("?")[2])) == found else None

    def sign(self, key: str, headers: dict[str, str], credentials: Any, at: str = "") -> str:
        """Return the URL that a GET of an object is sent to, with these headers.

        Args:
            key: one that is a `PLAIN_KEY`.
            headers: of the request, without that of the host.
            credentials: access_key, secret_key and token.
            at: the time of signing; now if empty.
        """
        at = at or datetime.now(UTC).strftime(_TIME)
        scope = f"{at[:8]}/{self.region}/{self.service}/aws4_request"
        values = {"host": self.host, **{name.lower(): " ".join(value.split()) for name, value in headers.items()}}
        names = ";".join(sorted(values))
        asked = {
            "X-Amz-Algorithm": _ALGORITHM,
            "X-Amz-Credential": f"{credentials.access_key}/{scope}",
            "X-Amz-Date": at,
            "X-Amz-Expires": self.expires_s,
            **({"X-Amz-Security-Token": credentials.token} if credentials.token else {}),
            "X-Amz-SignedHeaders": names,
        }
        query = urllib.parse.urlencode(asked, quote_via=urllib.parse.quote, safe="")
        lines = "".join(f"{name}:{values[name]}\n" for name in sorted(values))
        request = f"GET\n{self.path}{key}\n{query}\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
        told = f"{_ALGORITHM}\n{at}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        secret = _signing_key(credentials.secret_key, at[:8], self.region, self.service)
        return f"{self.before_key}{key}?{query}&X-Amz-Signature={_hmac(secret, told).hex()}"


@functools.lru_cache(maxsize=8)
def _signing_key(secret: str, day: str, region: str, service: str) -> bytes:
    return functools.reduce(_hmac, (day, region, service, "aws4_request"), f"AWS4{secret}".encode())


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
