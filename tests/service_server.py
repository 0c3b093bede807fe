"""A small HTTP server on localhost, in the place of a judge or a reward model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

Reply = tuple[int, Any] | tuple[int, Any, Mapping[str, str]]
"""Status, body (text, or what becomes JSON), and headers."""


@dataclass
class Served:
    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    """The requests, in order."""
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    end: Event = field(default_factory=Event)
    """Set at the end of the test; a reply may wait for it."""
    lock: Lock = field(default_factory=Lock)


@contextmanager
def serving(reply: Callable[[Any, int], Reply], port: int = 0) -> Iterator[Served]:
    """A server until the end of the context.

    Args:
        reply: gets a request, and the number of earlier ones with the same body.
        port: 0 means any that is free.
    """
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with served.lock:
                earlier = served.bodies.count(body)
                served.bodies.append(body)
                served.paths.append(self.path)
                served.keys.append(self.headers["authorization"])
                served.at_once += 1
                served.most_at_once = max(served.most_at_once, served.at_once)
            status, given, *headers = reply(body, earlier)
            with served.lock:
                served.at_once -= 1
            data = (given if isinstance(given, str) else json.dumps(given)).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(data)), **(headers[0] if headers else {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

        def handle(self) -> None:
            try:
                super().handle()
            except (BrokenPipeError, ConnectionResetError):  # the client did not wait
                pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", port), Handler) as server:
        served.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield served
        finally:
            served.end.set()
            server.shutdown()
            thread.join()
