"""S3, and servers with its API: botocore lists, and objects come through the session of s3fs.

The client's own calls take four times the CPU time. Its retries and those of botocore are off: they would multiply with
ours. botocore's signer alone takes 130 us for each URL, and `UrlSigner`, made like the URL that it signs, 23.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from penstock.data.optional import need
from penstock.data.storage.backend import FileVersion, ListedFile, mark_of_server
from penstock.data.storage.http_backend import Http, check_status
from penstock.data.storage.remote_errors import REFUSED_REDIRECT
from penstock.data.storage.retries import TransientError
from penstock.data.storage.url_signer import PLAIN_KEY, PROBE, UrlSigner

_MAX_ERROR_NBYTES = 4096


class S3(Http):
    """S3, and servers with its API."""

    def __init__(self, fs: Any, stall_s: float) -> None:
        super().__init__(fs, stall_s)
        self._clients: set[int] = set()
        self._marks: dict[str, str] = {}
        """By bucket."""
        self._signers: dict[tuple[str, str], UrlSigner | None] = {}
        """By client, and bucket with the user's arguments; None where the client has to sign each URL itself."""

    async def file_version(self, url: str) -> FileVersion:
        """Return a file's size and ETag."""
        bucket, key, version = self._fs.split_path(url)
        which = {"VersionId": version} if version else {}
        with self._translate_errors(url):
            response = await self._with_timeout(self._fs._call_s3("head_object", Bucket=bucket, Key=key, **which))
        if response.get("ContentLength") is None:
            raise TransientError("the server did not report the size of the file")
        changed = response["ResponseMetadata"]["HTTPHeaders"].get("last-modified")
        told = str(response.get("ETag") or changed or "")
        return FileVersion(int(response["ContentLength"]), told and told + await self._mark(url))

    async def find(self, url: str) -> list[ListedFile]:
        """Return all files below a folder, sorted, with their sizes and ETags."""
        bucket, key, _ = self._fs.split_path(self._path(url))
        root, found = f"{url.partition('://')[0]}://{bucket}/", list[ListedFile]()
        with self._translate_errors(url):
            client, mark = await self._client(bucket), await self._mark(url)
            arguments = {"Bucket": bucket, "Prefix": f"{key}/" if key else "", **self._fs.req_kw}
            arguments = self._fs._get_s3_method_kwargs(client.list_objects_v2, **arguments)
            async for page in client.get_paginator("list_objects_v2").paginate(**arguments):
                for one in page.get("Contents", ()):
                    if not one["Key"].endswith("/"):
                        found.append((root + one["Key"], one["Size"], one["ETag"] + mark))
        return sorted(found) or await super().find(url)

    async def _mark(self, url: str) -> str:
        bucket = self._fs.split_path(url)[0]
        if bucket not in self._marks:
            self._marks[bucket] = mark_of_server((await self._client(bucket)).meta.endpoint_url)
        return self._marks[bucket]

    def _session(self) -> Any:
        return self._fs._s3

    @asynccontextmanager
    async def _get(self, url: str, start: int, end: int | None) -> AsyncIterator[Any]:
        with self._translate_errors(url):
            client, signed, headers = await self._sign(url, f"bytes={start}-{'' if end is None else end - 1}")
        async with self._send(url, client, signed, headers) as response:
            yield response

    @asynccontextmanager
    async def _send(self, url: str, client: Any, signed: str, headers: dict[str, str]) -> AsyncIterator[Any]:
        awsrequest = need("botocore.awsrequest", "s3")
        with self._translate_errors(url):
            request = awsrequest.AWSPreparedRequest("GET", signed, headers, None, stream_output=True)
            sent = await self._with_timeout(client._endpoint.http_session.send(request))
            async with sent.raw as response:
                if response.status in (301, 302, 307, 400):  # of another region? botocore asks there from then on
                    self._signers.clear()
                    await self.file_version(url)
                    refused = REFUSED_REDIRECT if response.status < 400 else ""
                    raise TransientError(f"the server answered HTTP {response.status}{refused}")
                answer = await response.content.read(_MAX_ERROR_NBYTES) if response.status >= 400 else b""
                code = re.search(rb"<Code>(\w+)</Code>", answer)
                check_status(url, response, code[1].decode() if code else "")
                yield response

    async def _sign(self, url: str, byte_range: str) -> tuple[Any, str, dict[str, str]]:
        """Return the client that answers for a bucket, and the URL and headers that request a range of an object."""
        bucket, key, version = self._fs.split_path(url)
        client = await self._client(bucket)
        arguments = {"Bucket": bucket, "Key": key, "Range": byte_range, **({"VersionId": version} if version else {})}
        arguments = self._fs._get_s3_method_kwargs(client.get_object, **arguments)
        signer = await self._signer(client, arguments) if not version and PLAIN_KEY.fullmatch(key) else None
        if signer is not None:
            headers = _headers(client, arguments)
            credentials = await client._request_signer._credentials.get_frozen_credentials()
            return client, signer.sign(key, headers, credentials), headers
        signed = await client.generate_presigned_url("get_object", Params=arguments)  # which adds to the arguments
        return client, signed, _headers(client, arguments)

    async def _client(self, bucket: str) -> Any:
        await self._fs.set_session()
        client = await self._fs.get_s3(bucket)
        if id(client) not in self._clients:
            self._clients.add(id(client))
            client.meta.events.register_first("choose-signer.s3.GetObject", _keep_signature_version)
        return client

    async def _signer(self, client: Any, arguments: dict[str, str]) -> UrlSigner | None:
        """Return what signs URLs as the client does for these arguments, whatever the key; None if only it can."""
        like = str(id(client)), repr([item for item in arguments.items() if item[0] not in ("Key", "Range")])
        if like not in self._signers:
            credentials = client._request_signer._credentials
            frozen = None if credentials is None else await credentials.get_frozen_credentials()
            probe = await client.generate_presigned_url("get_object", Params={**arguments, "Key": PROBE})
            headers = _headers(client, arguments)
            self._signers[like] = None if frozen is None else UrlSigner.like(probe, headers, frozen)
        return self._signers[like]

    def _foreign_errors(self) -> tuple[type[Exception], ...]:
        botocore = need("botocore.exceptions", "s3")
        return (*super()._foreign_errors(), botocore.BotoCoreError, botocore.ClientError)


def _headers(client: Any, arguments: dict[str, str]) -> dict[str, str]:
    """Return the headers that a request for an object has by its arguments."""
    members = client.meta.service_model.operation_model("GetObject").input_shape.members
    places = {name: members[name].serialization for name in arguments}
    return {one["name"]: arguments[name] for name, one in places.items() if one.get("location") == "header"}


def _keep_signature_version(signature_version: Any, **_: Any) -> Any:
    """Sign a URL by version 4, as all requests are: botocore takes version 2 for some, which new buckets refuse.

    By S3's kind of it, where the signature says nothing of the body; with any other, S3 answers 403.
    """
    if signature_version in ("v4", "v4-query"):
        return "s3v4-query"
    return signature_version if "v4" in str(signature_version) else None


def aws_session(**options: Any) -> Any:
    """Return a session for s3fs that has read what botocore knows of S3, which takes longer than a hundred requests."""
    session = need("aiobotocore.session", "s3").AioSession(**options)
    session.register_component("data_loader", _aws_data(session.get_config_variable("data_path")))
    return session


@cache
def _aws_data(path: str | None) -> Any:
    """Return what reads botocore's files once: in the training process, for its forked workers too."""
    return need("botocore.loaders", "s3").create_loader(path)
