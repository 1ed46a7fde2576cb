"""Servers on 127.0.0.1 that speak what is asked of Google's, Azure's and the Hugging Face Hub's storage."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import urllib.parse
from typing import Any
from xml.sax.saxutils import escape

from faulty_storage import Answer, Server


class Store(Server):
    """Objects of one bucket by their names; subclasses speak a protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.needs_token = ""
        """What the header Authorization has to hold."""

    def answer(self, method: str, path: str, headers: Any, body: bytes = b"") -> Answer:
        place, _, query = path.partition("?")
        if self.needs_token not in headers.get("Authorization", ""):
            return 401, {}, b"{}"
        asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        return self.reply(method, urllib.parse.unquote(place), asked, headers, body)

    def reply(self, method: str, place: str, asked: dict[str, str], headers: Any, body: bytes) -> Answer:
        raise NotImplementedError

    def listed(self, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
        """Return the objects and the folders right below a prefix."""
        objects, folders = [], set()
        for name in sorted(self.objects):
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                else:
                    objects.append(name)
        return objects, sorted(folders)

    def sent(self, name: str, headers: Any, more: dict[str, str]) -> Answer:
        """Return an object, or the range of it that is asked for."""
        data = self.objects.get(name)
        if data is None:
            return 404, more, b""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range") or headers.get("x-ms-range") or "")
        if wanted is None:
            return 200, more, data
        first, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
        if first >= len(data):
            return 416, {**more, "Content-Range": f"bytes */{len(data)}"}, b""
        return 206, {**more, "Content-Range": f"bytes {first}-{stop - 1}/{len(data)}"}, data[first:stop]

    def as_json(self, value: Any) -> Answer:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


class Google(Store):
    """Google Cloud Storage's JSON API, with one bucket: bucket."""

    def reply(self, method: str, place: str, asked: dict[str, str], headers: Any, body: bytes) -> Answer:
        if method == "POST":  # multipart/related: what it is, and its bytes
            boundary = headers["Content-Type"].partition("boundary=")[2].strip("\"' ").encode()
            first, second = body.split(b"--" + boundary)[1:3]
            name = json.loads(first.partition(b"\n\n")[2])["name"]
            if asked.get("ifGenerationMatch") == "0" and name in self.objects:
                return 412, {}, b"{}"
            self.objects[name] = second.partition(b"\n\n")[2].removesuffix(b"\n")
            return self.as_json(self._described(name))
        if "/b/bucket/o" not in place:
            return self.as_json({"name": "bucket"}) if place.endswith("/b/bucket") else (404, {}, b"{}")
        name = place.partition("/b/bucket/o")[2].removeprefix("/")
        if method == "DELETE":
            return (204 if self.objects.pop(name, None) is not None else 404), {}, b""
        if asked.get("alt") == "media":
            return self.sent(name, headers, {})
        if name:
            return self.as_json(self._described(name)) if name in self.objects else (404, {}, b"{}")
        objects, folders = self.listed(asked.get("prefix", ""), asked.get("delimiter", ""))
        return self.as_json({"items": [*map(self._described, objects)], "prefixes": folders})

    def _described(self, name: str) -> dict[str, Any]:
        digest = hashlib.md5(self.objects[name]).digest()
        return {
            "name": name,
            "bucket": "bucket",
            "size": str(len(self.objects[name])),
            "md5Hash": base64.b64encode(digest).decode(),
            "generation": str(int.from_bytes(digest[:6], "big")),
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
        }


class Azure(Store):
    """Azure's Blob Storage, with one container: bucket."""

    def reply(self, method: str, place: str, asked: dict[str, str], headers: Any, body: bytes) -> Answer:
        container, _, name = place.removeprefix("/account/").partition("/")
        if container != "bucket":
            return 404, {"x-ms-error-code": "ContainerNotFound"}, b""
        if asked.get("comp") == "list":
            return self._list(asked)
        if not name:
            return 200, {}, b""
        if method == "PUT":
            if headers.get("If-None-Match") == "*" and name in self.objects:
                return 409, {"x-ms-error-code": "BlobAlreadyExists"}, b""
            self.objects[name] = body
            return 201, self._described(name), b""
        if method == "DELETE":
            return (202 if self.objects.pop(name, None) is not None else 404), {}, b""
        if name not in self.objects:
            return 404, {"x-ms-error-code": "BlobNotFound"}, b""
        if method == "HEAD":
            return 200, {**self._described(name), "Content-Length": str(len(self.objects[name]))}, b""
        return self.sent(name, headers, self._described(name))

    def _list(self, asked: dict[str, str]) -> Answer:
        objects, folders = self.listed(asked.get("prefix", ""), asked.get("delimiter", ""))
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Content-Length>{len(self.objects[name])}</Content-Length>"
            f"<Etag>{self._etag(name)}</Etag><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name in objects
        )
        prefixes = "".join(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in folders)
        found = f"<Blobs>{blobs}{prefixes}</Blobs><NextMarker/>"
        page = f'<EnumerationResults ContainerName="bucket">{found}</EnumerationResults>'
        return 200, {"Content-Type": "application/xml"}, page.encode()

    def _etag(self, name: str) -> str:
        return f'"{hashlib.md5(self.objects[name]).hexdigest()}"'

    def _described(self, name: str) -> dict[str, str]:
        return {
            "ETag": self._etag(name),
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "x-ms-blob-type": "BlockBlob",
            "x-ms-request-server-encrypted": "false",
        }


class Hub(Store):
    """The Hugging Face Hub, with one data set: some/bucket."""

    def reply(self, method: str, place: str, asked: dict[str, str], headers: Any, body: bytes) -> Answer:
        if place in ("/api/datasets/some/bucket", "/api/datasets/some/bucket/revision/main"):
            return self.as_json({"id": "some/bucket", "sha": "0" * 40, "siblings": []})
        start = "/api/datasets/some/bucket/tree/main"
        if place.startswith(start):
            folder = place.removeprefix(start).strip("/")
            prefix = f"{folder}/" if folder else ""
            objects, folders = self.listed(prefix, "" if asked.get("recursive", "").lower() == "true" else "/")
            if prefix and not objects and not folders:
                return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
            files = [{"type": "file", "path": one, "size": len(self.objects[one]), "oid": "0"} for one in objects]
            return self.as_json([*files, *({"type": "directory", "path": one[:-1], "oid": "0"} for one in folders)])
        start = "/datasets/some/bucket/resolve/main/"
        if place.startswith(start):
            name = place.removeprefix(start)
            etag = hashlib.sha1(self.objects.get(name, b"")).hexdigest()
            return self.sent(name, headers, {"ETag": f'"{etag}"'})
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
