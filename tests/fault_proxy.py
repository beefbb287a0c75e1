"""A small HTTP/1.1 proxy that stands in front of an S3 server and makes asked-for requests fail in an asked-for way.

Responsible for passing requests on unchanged (the Host header too: the client signs the proxy's host and port, and the
server checks the signature against the header that it receives), for the faults, and for a log of every request, so that a test
can assert that its fault happened. Not responsible for TLS, HTTP/2 or speed: bodies are held whole in memory.
"""

import http.client
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self
from urllib.parse import urlsplit

REFUSALS = {  # status, reason, and the code in the body
    "403": (403, "Forbidden", "AccessDenied"),
    "404": (404, "Not Found", "NoSuchKey"),
    "503": (503, "Slow Down", "SlowDown"),
    "expired": (400, "Bad Request", "ExpiredToken"),  # as AWS answers to a token of yesterday
    "full": (507, "Insufficient Storage", "XMinioStorageFull"),  # as MinIO answers when its disks are full
}
KINDS = (*REFUSALS, "reset", "cut", "stall", "lost_reply")
NOT_FORWARDED = {"connection", "expect", "keep-alive"}
REWRITTEN = {"connection", "content-length", "keep-alive", "transfer-encoding"}
BODILESS = (204, 304)


class Request(NamedTuple):
    """One line of the log, written before the client sees the reply."""

    method: str
    path: str  # path and query as they were sent, percent-encoded
    outcome: str  # "206", or the kind of the fault
    byte_range: str | None  # the Range header


@dataclass
class _Rule:
    method: str | None
    path_part: str
    kind: str
    times: int | None
    skip: int
    after_bytes: int | None
    seconds: float

    def takes(self, method: str, path: str) -> bool:
        """Whether this request fails; counts it."""
        if self.method not in (None, method) or self.path_part not in path or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class FaultProxy:
    """`with FaultProxy(store.endpoint) as proxy:` listens at `proxy.endpoint` until the block ends."""

    def __init__(self, upstream_endpoint: str):
        self.upstream = urlsplit(upstream_endpoint).netloc
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fault(
        self,
        method: str | None,
        path_part: str,
        kind: str,
        times: int | None = 1,
        *,
        skip: int = 0,
        after_bytes: int | None = None,
        seconds: float = 20,
    ) -> None:
        """Lets matching requests fail: the first rule that takes a request decides.

        method None matches all. `skip` matching requests pass first, then `times` fail (None: for ever).
        "403", "404", "503", "expired" and "full" answer without asking the server. All other kinds reach it first: "reset" (RST) and
        "cut" (an orderly close) break off the reply after `after_bytes` of its body (None: half of it), "stall" pauses
        there for `seconds`, and "lost_reply" closes without a byte. So do the former for a reply without a body.
        """
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}: must be one of {', '.join(KINDS)}")
        with self._lock:
            self._rules.append(_Rule(method, path_part, kind, times, skip, after_bytes, seconds))

    def outcomes(self, method: str, path_part: str = "") -> list[str]:
        """The outcomes of the requests so far that match, in order of arrival of their replies."""
        return [each.outcome for each in list(self.requests) if each.method == method and path_part in each.path]

    def clear(self) -> None:
        """Forgets rules and log."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def _rule(self, method: str, path: str) -> _Rule | None:
        with self._lock:
            return next((rule for rule in self._rules if rule.takes(method, path)), None)

    def _record(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what these tests provoke; another error prints its traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One client connection, with one connection to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: FaultProxy

    def setup(self) -> None:
        super().setup()
        self._upstream = http.client.HTTPConnection(self.proxy.upstream, timeout=60)

    def finish(self) -> None:
        self._upstream.close()
        super().finish()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr: the log is `proxy.requests`."""

    def _answer(self) -> None:
        body = b"".join(self._request_body())
        if self.proxy.closing.is_set():  # a kept-alive connection must not outlive the proxy
            self.close_connection = True
            return
        rule = self.proxy._rule(self.command, self.path)
        if rule and rule.kind in REFUSALS:
            head, content = self._refusal(rule.kind)
        else:
            head, content = self._forward(body)
        outcome = rule.kind if rule else head.split(b" ", 2)[1].decode()
        self.proxy._record(Request(self.command, self.path, outcome, self.headers.get("Range")))
        if rule and rule.kind not in REFUSALS:
            self._break(rule, head, content)
        else:
            self.wfile.write(head + content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _request_body(self) -> Iterator[bytes]:
        """The body as it was sent; a chunked one keeps its framing, because it is forwarded as it is."""
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            yield self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return
        size = None
        while size != 0:
            line = self.rfile.readline()
            size = int(line.split(b";")[0], 16)
            yield line
            yield self.rfile.read(size + 2 if size else 0)
        while line.strip():  # trailers, then an empty line
            line = self.rfile.readline()
            yield line

    def _refusal(self, kind: str) -> tuple[bytes, bytes]:
        status, reason, code = REFUSALS[kind]
        content = (
            f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
            f"<Message>Injected by the fault proxy.</Message></Error>"
        ).encode()
        head = _head(status, reason, [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))])
        return head, b"" if self.command == "HEAD" else content

    def _forward(self, body: bytes) -> tuple[bytes, bytes]:
        """The server's reply as (head, body); 502 if it gives none."""
        try:
            self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in NOT_FORWARDED:
                    self._upstream.putheader(name, value)
            self._upstream.endheaders(body or None)
            response = self._upstream.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException):
            self._upstream.close()
            return _head(502, "Bad Gateway", [("Content-Length", "0")]), b""
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in REWRITTEN]
        if self.command == "HEAD":
            headers.append(("Content-Length", response.getheader("Content-Length", "0")))
        elif response.status not in BODILESS:
            headers.append(("Content-Length", str(len(content))))
        return _head(response.status, response.reason, headers), content

    def _break(self, rule: _Rule, head: bytes, content: bytes) -> None:
        """Sends the first part of the reply and no more, or no more for a while."""
        after_bytes = len(content) // 2 if rule.after_bytes is None else rule.after_bytes
        sent = len(head) + after_bytes if content and rule.kind != "lost_reply" else 0
        self.wfile.write((head + content)[:sent])
        if rule.kind == "stall":
            self.proxy.closing.wait(rule.seconds)
            self.wfile.write((head + content)[sent:])
            return
        self.close_connection = True
        if rule.kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()  # it holds the socket open; an orderly shutdown must not come before the reset
            self.connection.close()


def _head(status: int, reason: str, headers: list[tuple[str, str]]) -> bytes:
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")
