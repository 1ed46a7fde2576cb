"""An HTTP server with a latency, in a process of its own: objects by their URL, and as much of S3 as readers need.

GET, HEAD /bucket/KEY            an object or a range of it, with its ETag
GET /bucket?list-type=2&prefix=  a listing of at most 1 000 keys, as S3 pages it
PUT /bucket/KEY                  store an object
GET /requests                    how many requests were answered since this was asked last; without the latency
"""

from __future__ import annotations

import asyncio
import hashlib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from xml.sax.saxutils import escape

_PAGE = 1000


@contextmanager
def serving(objects: dict[str, bytes], latency_s: float) -> Iterator[str]:
    """Serve objects, by key, at 127.0.0.1; yields the URL of the server."""
    context = get_context("spawn")
    addresses, address = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(address, objects, latency_s), daemon=True)
    process.start()
    try:
        yield addresses.recv()
    finally:
        process.terminate()
        process.join()


def requests_since(url: str) -> int:
    """Return how many requests the server has answered since this was called last."""
    with urllib.request.urlopen(f"{url}/requests") as response:
        return int(response.read())


def _serve(address: Connection, objects: dict[str, bytes], latency_s: float) -> None:
    from aiohttp import web

    stored = dict(objects)
    count = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal count
        if request.path == "/requests":
            response, count = web.Response(text=str(count)), 0
            return response
        count += 1
        await asyncio.sleep(latency_s)
        key = request.match_info["path"].removeprefix("bucket").removeprefix("/")
        if request.method == "PUT":
            stored[key] = await request.read()
            return web.Response(headers={"ETag": _etag(stored[key])})
        if not key:
            return web.Response(text=_page(stored, request.query), content_type="application/xml")
        if key not in stored:
            return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>")
        data, headers, wanted = stored[key], {"ETag": _etag(stored[key])}, request.http_range
        if wanted.start is None:
            return web.Response(body=data, headers=headers)
        start, stop, _ = wanted.indices(len(data))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return web.Response(status=206, body=data[start:stop], headers=headers)

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        host, port = runner.addresses[0][:2]
        address.send(f"http://{host}:{port}")
        await asyncio.Event().wait()

    asyncio.run(run())


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _page(stored: dict[str, bytes], query: object) -> str:
    values = dict(query)  # type: ignore[call-overload]
    prefix, after = values.get("prefix", ""), values.get("continuation-token", "")
    keys = sorted(key for key in stored if key.startswith(prefix) and key > after)
    page = keys[:_PAGE]
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(_etag(stored[key]))}</ETag><Size>{len(stored[key])}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for key in page
    )
    more = len(keys) > len(page)
    token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
        f"<MaxKeys>{_PAGE}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>"
    )
