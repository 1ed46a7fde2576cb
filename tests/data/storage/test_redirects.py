"""Redirects: what says who the user is goes to the origin that the user named, and to no other."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import fsspec
import pytest
import yarl
from bucket import Address, put, serving
from faulty_storage import Files, Proxy

from penstock.core.errors import ExtraError, SourceError
from penstock.data.storage import redirects
from penstock.data.storage.redirects import RedirectSession, open_session, without_redirects
from penstock.data.storage.storage import Storage

DATA = bytes(range(256)) * 40
QUICK = Storage(range_nbytes=4096, stall_s=0.5, retries=2, timeout_s=30)
SECRETS = ("s3cret-header", "s3cret-cookie", "s3cret-auth", "s3cret-of-all", "s3cret-word")
STATUSES = (301, 302, 303, 307, 308)


@pytest.fixture(autouse=True)
def _hang_up_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.data.storage.event_loop.LINGER_S", 0.05)


class Asked(Files):
    """Files, and the headers of all requests; some paths redirect."""

    def __init__(self) -> None:
        super().__init__({"/a.bin": DATA, "/d/b.bin": DATA})
        self.seen: list[tuple[str, str]] = []
        self.led: dict[str, tuple[int, str]] = {}
        """Where a path leads: the status, and the URL."""

    def answer(self, method: str, path: str, headers: Any, body: bytes = b"") -> Any:
        self.seen.append((path, str(headers)))
        if path in self.led:
            status, there = self.led[path]
            return status, {"Location": there}, b""
        return super().answer(method, path, headers, body)

    def told(self, path: str) -> set[str]:
        """Return the secrets that requests for a path had."""
        return {secret for secret in SECRETS for asked, text in self.seen if asked == path and secret in text}


@pytest.fixture
def home() -> Iterator[Asked]:
    with Asked().running() as server:
        assert isinstance(server, Asked)
        yield server


@pytest.fixture
def other() -> Iterator[Asked]:
    with Asked().running() as server:
        assert isinstance(server, Asked)
        yield server


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Have fsspec configured with credentials of all kinds; return those that a request of the user's has."""
    own = {
        "headers": {"X-Api-Key": "s3cret-header", "Authorization": "Bearer s3cret-auth", "Cookie": "own=s3cret-cookie"},
        "client_kwargs": {"headers": {"Private-Token": "s3cret-of-all"}, "cookies": {"shared": "s3cret-cookie"}},
    }
    monkeypatch.setitem(fsspec.config.conf, "http", own)
    return {"s3cret-header", "s3cret-auth", "s3cret-cookie", "s3cret-of-all"}


@pytest.mark.parametrize("status", STATUSES)
def test_another_origin_gets_no_credentials(home: Asked, other: Asked, configured: set[str], status: int) -> None:
    home.led = {"/moved.bin": (status, f"{other.url}/a.bin")}
    assert QUICK.read(f"{home.url}/moved.bin", 1 << 20) == DATA
    with QUICK.open(f"{home.url}/moved.bin", 100) as file:
        assert file.read() == DATA[100:]
    assert home.told("/moved.bin") == configured
    assert len(other.seen) >= 2
    assert other.told("/a.bin") == set()


def test_the_same_origin_gets_what_it_got(home: Asked, configured: set[str]) -> None:
    home.led = {"/1": (302, "/2"), "/2": (307, f"{home.url}/a.bin")}
    assert QUICK.read(f"{home.url}/1", 1 << 20) == DATA
    assert home.told("/1") == home.told("/2") == home.told("/a.bin") == configured


def test_who_comes_back_by_another_origin_has_no_credentials_either(
    home: Asked, other: Asked, configured: set[str]
) -> None:
    home.led, other.led = {"/1": (302, f"{other.url}/2")}, {"/2": (302, f"{home.url}/a.bin")}
    assert QUICK.read(f"{home.url}/1", 1 << 20) == DATA
    assert home.told("/1") == configured
    assert other.told("/2") == home.told("/a.bin") == set()


def test_a_password_in_a_url_goes_to_its_own_origin_alone(home: Asked, other: Asked) -> None:
    home.led = {"/1": (302, "/2"), "/2": (302, f"{other.url}/a.bin")}
    url = home.url.replace("://", "://me:s3cret-word@")
    assert QUICK.read(f"{url}/1", 1 << 20) == DATA
    basic = base64.b64encode(b"me:s3cret-word").decode()
    assert {basic in text for _, text in home.seen} == {True}
    assert {basic in text or "s3cret-word" in text for _, text in other.seen} == {False}


def test_a_listing_that_is_redirected_takes_no_credentials_along(
    home: Asked, other: Asked, configured: set[str]
) -> None:
    home.led = {"/d/": (302, f"{other.url}/d/")}
    QUICK.expand(f"{other.url}/d/*")  # the other server is a good one
    other.seen.clear()
    with suppress(SourceError):  # what the other server lists lies elsewhere
        QUICK.list(f"{home.url}/d/")
    assert other.seen != []
    assert other.told("/d/") == set()
    assert home.told("/d/") == configured


def test_a_stranger_that_refuses_is_told_of(home: Asked, other: Asked, configured: set[str]) -> None:
    home.led, other.led = {"/1": (302, f"{other.url}/2")}, {"/2": (403, "")}
    with pytest.raises(
        SourceError, match=rf"HTTP 403, of {other.url}, to which a redirect led: it gets no credentials"
    ):
        QUICK.read(f"{home.url}/1", 1 << 20)


@pytest.mark.parametrize("place", ["ftp://host/a", "file:///etc/passwd", "http://[", "javascript:1"])
def test_a_redirect_out_of_the_web_is_an_error(home: Asked, place: str) -> None:
    home.led = {"/1": (302, place)}
    with pytest.raises(SourceError, match="which is no URL of the web"):
        QUICK.read(f"{home.url}/1", 1 << 20)


def test_a_circle_of_redirects_ends(home: Asked) -> None:
    home.led = {"/1": (302, "/2"), "/2": (302, "/1")}
    with pytest.raises(SourceError, match="redirects more than 10 times"):
        QUICK.read(f"{home.url}/1", 1 << 20)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("method", ["put", "post"])
def test_what_is_written_goes_to_no_other_server(home: Asked, other: Asked, method: str, status: int) -> None:
    home.led = {"/up": (status, f"{other.url}/up")}

    async def upload() -> None:
        session = await open_session(None)
        try:
            async with getattr(session, method)(f"{home.url}/up", data=b"s3cret-word"):
                pass
        finally:
            await session.close()

    with pytest.raises(SourceError, match="redirects what is written"):
        asyncio.run(upload())
    assert (len(home.seen), other.seen) == (1, [])


class Sent:
    """A session that notes what it sends, and answers with the next redirect."""

    def __init__(self, places: list[str]) -> None:
        self.places = places
        self.sent: list[tuple[str, dict[str, Any]]] = []

    async def request(self, method: str, url: yarl.URL, **options: Any) -> Any:
        self.sent.append((str(url), options))
        return Reply(url, self.places.pop(0) if self.places else None)


class Reply:
    def __init__(self, url: yarl.URL, place: str | None) -> None:
        self.url, self.status = url, 200 if place is None else 307
        self.headers = {} if place is None else {"Location": place}

    def release(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("first", "place", "is_same"),
    [
        ("http://host/a", "http://host:80/b", True),
        ("https://host/a", "https://HOST:443/b", True),
        ("https://host/a", "/b", True),
        ("https://host/a", "//host/b", True),
        ("http://host/a", "https://host/b", False),
        ("https://host/a", "http://host/b", False),
        ("https://host/a", "https://host:444/b", False),
        ("https://host/a", "https://sub.host/b", False),
        ("https://host/a", "https://host.evil/b", False),
        ("https://host/a", "https://host@evil/b", False),
        ("https://host/a", "//evil/b", False),
    ],
)
def test_an_origin_is_a_scheme_a_host_and_a_port(first: str, place: str, is_same: bool) -> None:
    places = [place]
    own, stranger = Sent(places), Sent(places)
    headers = {"X-Api-Key": "k", "Range": "bytes=0-1", "Cookie": "c"}
    options = {"headers": headers, "cookies": {"a": "b"}, "auth": "of me", "params": {"key": "k"}}

    async def ask() -> Any:
        return await RedirectSession(own, stranger).get(first, **options)

    asyncio.run(ask())
    if is_same:
        assert [sent["headers"] for _, sent in own.sent] == [headers, headers]
        assert stranger.sent == []
    else:
        ((_, sent),) = stranger.sent
        assert sent == {"allow_redirects": False, "headers": {"Range": "bytes=0-1"}}
        assert len(own.sent) == 1


# ── S3 ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def moto() -> Iterator[Address]:
    with serving() as address:
        put(address, {"train/0.txt": b"text"})
        yield address


@pytest.fixture
def s3(moto: Address, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(*moto).running() as proxy:
        assert isinstance(proxy, Proxy)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setenv("AWS_SESSION_TOKEN", "s3cret-word")
        yield proxy


@pytest.mark.parametrize("region", [None, "eu-west-1", "evil.example/"])
@pytest.mark.parametrize("status", STATUSES)
def test_no_redirect_of_s3_takes_a_request_elsewhere(s3: Proxy, other: Asked, status: int, region: str | None) -> None:
    told = {"Location": f"{other.url}/a.bin", **({} if region is None else {"x-amz-bucket-region": region})}
    s3.answer = lambda *_: (status, told, b"")  # type: ignore[method-assign]
    storage = Storage(stall_s=0.5, retries=1, timeout_s=5)
    with pytest.raises(SourceError) as raised:
        storage.read("s3://bucket/train/0.txt", 1 << 20)
    assert "s3cret-word" not in str(raised.value)
    for ask in (lambda: storage.list("s3://bucket/train/"), lambda: storage.nbytes("s3://bucket/train/0.txt")):
        with pytest.raises(SourceError):
            ask()
    assert s3.requests != []
    assert other.seen == []


def test_a_redirect_for_the_region_of_a_bucket_is_asked_of_the_endpoint_that_the_user_named(
    s3: Proxy, other: Asked
) -> None:
    honest, first = s3.answer, [(307, {"Location": other.url, "x-amz-bucket-region": "eu-west-1"}, b"")]
    s3.answer = lambda *asked: first.pop() if first and asked[0] == "GET" else honest(*asked)  # type: ignore[method-assign]
    assert Storage(stall_s=0.5, retries=3).read("s3://bucket/train/0.txt", 1 << 20) == b"text"
    assert other.seen == []


def test_an_aiobotocore_that_cannot_be_kept_from_following_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        AIOHTTPSession = object
        AioConfig = object

    monkeypatch.setattr(redirects, "need", lambda *_: Old)
    with pytest.raises(ExtraError, match="a newer aiobotocore is needed"):
        without_redirects()
