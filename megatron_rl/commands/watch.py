"""Serve the report of a run to a browser. The page follows a run that is going on; Ctrl-C ends the server, not the run.

megatron-rl watch runs/gsm8k                serves http://127.0.0.1:8642
megatron-rl watch runs/gsm8k --port 0       at any free port

The run may be on another machine: `ssh -L 8642:127.0.0.1:8642 MACHINE megatron-rl watch RUN`.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron_rl.observe.records import CONFIG, METRICS
from megatron_rl.observe.report import data_version, live_data, run_page
from megatron_rl.processes import piped

PORT = 8642
HOST = re.compile(r"(\[[^\]]+\]|[^:]+)(?::\d+)?")
"""The header `Host`: a name or an address, and perhaps a port."""
EVERYWHERE = ("0.0.0.0", "::", "")
"""A server with one of these hosts listens at all interfaces, where the machine's own names lead to it, too."""


class ReportServer(ThreadingHTTPServer):
    """Serves the page of a run, its data (`data.json`), and a text that changes with them (`version.json`).

    Args:
        run_folder: the run's folder; metrics.jsonl may come later.
        host: the address of one of this machine's interfaces.
        port: 0 takes a free one, which is then `server_port`.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, run_folder: Path, host: str, port: int) -> None:
        self.run_folder = run_folder
        own = {socket.gethostname(), socket.getfqdn()} if host in EVERYWHERE else set()
        self._names = {name.lower() for name in {"localhost", host} | own}
        super().__init__((host, port), ReportRequest)

    def answers_to(self, host: str) -> bool:
        """Whether a request with this header `Host` is for this server. A page of another site can let its own name
        point to this machine, and would then read the answers as if they were its own (DNS rebinding); it cannot do
        that with an address."""
        found = HOST.fullmatch(host.lower())
        name = found[1].strip("[]") if found else ""
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return name in self._names

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"


class ReportRequest(BaseHTTPRequestHandler):
    """One request to a ReportServer."""

    server: ReportServer

    def do_GET(self) -> None:
        folder = self.server.run_folder
        name, host = self.path.partition("?")[0], self.headers.get("Host", "")
        if not self.server.answers_to(host):
            return self._reply(403, "text/plain", f"this server has no name {host!r}; open it by its address")
        try:
            if name == "/":
                self._reply(200, "text/html", run_page(folder, is_live=True))
            elif name == "/version.json":
                self._reply(200, "application/json", json.dumps({"version": data_version(folder)}))
            elif name == "/data.json":
                self._reply(200, "application/json", live_data(folder))
            else:
                self._reply(404, "text/plain", f"there is no {name} here; the report is /")
        except (ValueError, FileNotFoundError) as error:
            if name == "/":
                self._reply(500, "text/plain", f"error: {error}")
            else:
                self._reply(500, "application/json", json.dumps({"error": str(error)}))

    def _reply(self, status: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", errors="backslashreplace")
        # A browser that has closed its page needs no answer.
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Write nothing: a page asks every two seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the address and serve until Ctrl-C; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at; default: only this machine")
    parser.add_argument("--port", type=_port, default=PORT, help=f"default: {PORT}; 0 takes a free one")
    options = parser.parse_args(arguments)
    if not options.run.is_dir():
        return _refuse(f"{options.run} is no folder; give the folder of a run, which has its metrics.jsonl")
    if not any((options.run / name).exists() for name in (CONFIG, METRICS)):
        return _refuse(f"{options.run} has no {CONFIG} and no {METRICS}, so it is no run's folder")
    try:
        server = ReportServer(options.run, options.host, options.port)
    except OSError as error:
        place = f"{options.host}:{options.port}"
        if error.errno == errno.EADDRINUSE:
            return _refuse(f"{place} is in use; choose another port with --port, or any free one with --port 0")
        return _refuse(f"cannot listen at {place} ({error}); choose others with --host and --port")
    with server:
        print(f"{server.url} shows {options.run} until Ctrl-C", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 2**16:
        raise argparse.ArgumentTypeError(f"{port} is no port; they are from 0 to {2**16 - 1}")
    return port


if __name__ == "__main__":
    sys.exit(piped(main))
