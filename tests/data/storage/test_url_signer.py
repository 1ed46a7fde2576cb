"""URLs of S3 that are signed here are those that botocore signs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import botocore.session
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config

from penstock.data.storage.url_signer import PLAIN_KEY, PROBE, UrlSigner


def parts(url: str) -> tuple[str, list[tuple[str, str]]]:
    place, _, query = url.partition("?")
    return place, sorted(parse_qsl(query))


def credentials(token: str | None) -> Any:
    return SimpleNamespace(access_key="AKIA/é", secret_key="se cret/+", token=token)


def by_botocore(url: str, headers: dict[str, str], who: Any) -> tuple[str, str]:
    request = AWSRequest("GET", url, headers)
    S3SigV4QueryAuth(who, "s3", "eu-west-1", expires=900).add_auth(request)
    return request.url, request.context["timestamp"]


@pytest.mark.parametrize("token", [None, "to/ken+="])
@pytest.mark.parametrize("base", ["https://bucket.s3.eu-west-1.amazonaws.com/", "http://127.0.0.1:9000/a-bucket/"])
def test_a_url_is_the_one_that_botocore_signs(base: str, token: str | None) -> None:
    chance, who = random.Random(base), credentials(token)
    headers = {"Range": "bytes=0-99", "x-amz-request-payer": "requester"}
    signer = UrlSigner.like(by_botocore(base + PROBE, headers, who)[0], headers, who)
    assert signer is not None
    for _ in range(20):
        key = "".join(chance.choices("aZ09_.-", k=9)) + "/" + "".join(chance.choices("aZ09_.-", k=9))
        assert PLAIN_KEY.fullmatch(key)
        wanted = {**headers, "Range": f"bytes=0-{chance.randrange(10**9)}"}
        url, at = by_botocore(base + key, wanted, who)
        assert parts(signer.sign(key, wanted, who, at)) == parts(url)


def test_the_client_of_a_bucket_signs_like_that() -> None:
    session = botocore.session.get_session()
    session.set_credentials("key", "secret", "token")
    client = session.create_client("s3", "us-west-2", config=Config(signature_version="s3v4"))
    who, headers = SimpleNamespace(access_key="key", secret_key="secret", token="token"), {"Range": "bytes=0-9"}

    def presigned(key: str) -> str:
        url: str = client.generate_presigned_url(
            "get_object", Params={"Bucket": "bucket", "Key": key, "Range": "bytes=0-9"}
        )
        return url

    signer = UrlSigner.like(presigned(PROBE), headers, who)
    assert signer is not None
    url = presigned("train/001.jpg")
    assert parts(signer.sign("train/001.jpg", headers, who, dict(parse_qsl(url))["X-Amz-Date"])) == parts(url)


def test_there_is_no_signer_where_more_is_signed_than_is_known_here() -> None:
    who, headers = credentials(None), {"Range": "bytes=0-9"}
    url = by_botocore(f"https://bucket.s3.amazonaws.com/{PROBE}", headers, who)[0]
    assert UrlSigner.like(url, headers, who) is not None
    assert UrlSigner.like(url, {}, who) is None, "another header"
    assert UrlSigner.like(url, headers, credentials("token")) is None
    assert UrlSigner.like(url + "&x-id=GetObject", headers, who) is None
    assert UrlSigner.like(url.replace("SHA256", "SHA512"), headers, who) is None
    assert UrlSigner.like(url.replace(PROBE, "other"), headers, who) is None
    assert (
        UrlSigner.like("https://bucket.s3.amazonaws.com/penstock-probe?AWSAccessKeyId=a&Signature=b", {}, who) is None
    )


@pytest.mark.parametrize("key", ["/a", "a//b", "a b", "a+b", "ü", "a/", "a?b", "a%20", ""])
def test_keys_that_a_url_changes_are_left_to_botocore(key: str) -> None:
    assert PLAIN_KEY.fullmatch(key) is None
