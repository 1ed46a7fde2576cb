"""Servers on 127.0.0.1 that fail as planned: files over HTTP with ranges, and a proxy before another server."""

from __future__ import annotations

import hashlib
import http.client
import http.server
import random
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = tuple[int, dict[str, str], bytes]
_MAX_HELD_S = 10.0


@dataclass
class FaultPlan:
    """The fault of each request: first those of a list, then random ones."""

    first: list[str] = field(default_factory=list)
    """One of: "", "500", "503", "cut", "reset", "stall", "slow", "short", "refuse"."""
    fault_rate: float = 0.0
    """The fraction of later requests that fail."""
    kinds: tuple[str, ...] = ("500", "503", "cut", "reset", "slow", "refuse")
    seed: int = 0
    only: str = ""
    """A pattern of paths; requests for others never fail."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    def draw(self, path: str) -> str:
        with self._lock:
            if not re.search(self.only, path):
                return ""
            if self.first:
                return self.first.pop(0)
            return self._random.choice(self.kinds) if self._random.random() < self.fault_rate else ""


class Server(http.server.ThreadingHTTPServer):
    """Answers by `answer`, or fails as planned."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.plan = FaultPlan()
        self.requests: list[tuple[str, str, str]] = []
        """Method, path, range."""
        self.range_barrier: threading.Barrier | None = None
        """Requests for ranges are answered when all of its parties are waiting."""
        self.ended = threading.Event()
        self.stalls_over = 0
        """Answers that stalled and have been given up."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, method: str, path: str, headers: Any, body: bytes = b"") -> Answer:
        raise NotImplementedError

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing when a client disconnects."""

    @contextmanager
    def running(self) -> Iterator[Server]:
        thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.ended.set()
            self.shutdown()
            thread.join()
            self.server_close()


class Files(Server):
    """Files by their path."""

    def __init__(self, files: dict[str, bytes], *, has_ranges: bool = True, has_etags: bool = True) -> None:
        super().__init__()
        self.files = files
        self.has_ranges = has_ranges
        self.has_etags = has_etags

    def answer(self, method: str, path: str, headers: Any, body: bytes = b"") -> Answer:
        path = path.partition("?")[0]
        if path.endswith("/"):
            names = sorted({name.removeprefix(path).partition("/") for name in self.files if name.startswith(path)})
            page = "".join(f'<a href="{name}{slash}">{name}</a>' for name, slash, _ in names)
            return 200, {"Content-Type": "text/html"}, page.encode()
        if path not in self.files:
            return 404, {}, b"no"
        data = self.files[path]
        etag = {"ETag": f'"{hashlib.md5(data).hexdigest()}"'} if self.has_etags else {}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", ""))
        if wanted is None or not self.has_ranges:
            return 200, etag, data
        start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        if start >= len(data):
            return 416, {**etag, "Content-Range": f"bytes */{len(data)}"}, b""
        return 206, {**etag, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}, data[start:end]


class Proxy(Server):
    """Forwards requests to another server, and its responses."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._upstream = (host, port)

    def answer(self, method: str, path: str, headers: Any, body: bytes = b"") -> Answer:
        connection = http.client.HTTPConnection(*self._upstream, timeout=30)
        try:
            request_headers = {
                name: value for name, value in headers.items() if name.lower() not in ("connection", "expect")
            }
            connection.request(method, path, body or None, request_headers)
            answer = connection.getresponse()
            response_headers = {
                name: value
                for name, value in answer.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "server", "date")
            }
            return answer.status, response_headers, answer.read()
        finally:
            connection.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.requests.append((self.command, self.path, wanted))
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.plan.draw(self.path)
        if fault == "refuse":
            self._disconnect()
            return
        if fault in ("500", "503"):
            self._send(int(fault), {}, b"<Error><Code>InternalError</Code></Error>")
            return
        status, headers, body = self.server.answer(
            self.command, self.path, self.headers, **({"body": sent} if sent else {})
        )
        if wanted and wanted != "bytes=0-0" and self.server.range_barrier is not None:
            self.server.range_barrier.wait(_MAX_HELD_S)
        half = len(body) // 2
        if fault in ("cut", "reset", "stall") and len(body) > 1:
            self._send(status, headers, body[:half], length=len(body))
            if fault == "stall":
                self.server.ended.wait(_MAX_HELD_S)
                self.server.stalls_over += 1
            self._disconnect(resets=fault == "reset")
        elif fault == "slow":
            self._send(status, headers, body[:half], length=len(body))
            self.wfile.flush()
            self.server.ended.wait(0.05)
            self.wfile.write(body[half:])
        elif fault == "short":
            self._send(status, headers, body[:half])
        else:
            self._send(status, headers, body)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - http.server's

    def _send(self, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        known = {name.lower() for name in headers}
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in known:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _disconnect(self, *, resets: bool = True) -> None:
        self.close_connection = True
        if resets:  # closing sends RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.wfile = _Nothing()
        else:
            self.wfile.flush()
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _Nothing:
    closed = True

    def flush(self) -> None:
        """Nothing is sent any more."""

    def close(self) -> None:
        """There is nothing to close."""
