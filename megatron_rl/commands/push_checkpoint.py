"""Push the weights of a checkpoint into running vLLM servers, without restarting them.

Every server receives its own shards over the bridge, directly into its live parameters. Requests wait meanwhile. The
checkpoint is a Hugging Face folder or a checkpoint that `megatron-rl convert to-megatron` wrote. All servers must have
the same model and the same layout, which the tool asks them for. Start each server with

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "megatron_rl"}'

in an environment where this package is installed. With --load-format dummy it need not load any weights first.

    megatron-rl push-weights runs/tiny/hf http://localhost:8000
    megatron-rl push-weights models/Qwen3-32B http://node1:8000 http://node2:8000 --version 3 --json

Until the whole push has arrived, GET /weight_info of a server says that its weights are mixed. If this program is
killed, the servers stay paused until the next push. The exit code is 0, or 1 with an error message.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # the store would print its stack; the tool reports errors in one line

import argparse
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.convert import Source, open_checkpoint
from megatron_rl.convert.forms import open_chunks
from megatron_rl.convert.target import TargetTensor, blocks
from megatron_rl.convert.tensor_files import Maps
from megatron_rl.layout import Engines
from megatron_rl.processes import failed, piped
from megatron_rl.types import Mesh, Metrics

START = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "megatron_rl"}\''
BROKEN = "the servers hold a mix of weights, and their answers mean nothing until a whole push has arrived: push again"
BROKEN_OFF = "mixed: a push broke off"
"""The weight version that a server reports after a push broke off."""
CONTROL_S = 60.0
"""The time-out of calls that do not wait for other servers. The first call of /server_info takes seconds."""
GRACE_S = 2.0
"""The time that the others have after a first failure to report theirs, which may name the cause."""


class Server:
    """The HTTP endpoints of one `vllm serve`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.host = url.rstrip("/"), urlsplit(url).hostname
        if urlsplit(url).scheme not in ("http", "https") or not self.host:
            raise ValueError(f"{url} is not the address of a server; give one such as http://localhost:8000")
        self.timeout_s = timeout_s
        config = self.call("server_info?config_format=json", post=False)["vllm_config"]
        backend = (config["weight_transfer_config"] or {}).get("backend")
        if backend != "megatron_rl":
            raise ValueError(f"{self.url} takes its weights by {backend or 'no transfer at all'}; {START}")
        parallel = config["parallel_config"]
        if parallel["data_parallel_size"] > 1:
            raise ValueError(f"{self.url} is data-parallel; start a separate server for each replica")
        self.engines = Engines(
            1,
            parallel["tensor_parallel_size"],
            parallel["pipeline_parallel_size"],
            parallel["enable_expert_parallel"],
        )
        self.dtype = config["model_config"]["dtype"].removeprefix("torch.")
        self.on_cpu = config["device_config"]["device"] == "cpu"

    def call(self, path: str, body: dict[str, Any] | None = None, *, post: bool = True, waits: bool = False) -> Any:
        """Call an endpoint and return its answer.

        Args:
            waits: the call waits for the push, so its time-out must be longer than the push's own.

        Raises:
            RuntimeError: the server does not answer, or the call failed there.
        """
        data = json.dumps(body or {}).encode() if post else None
        request = Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=self.timeout_s + CONTROL_S if waits else CONTROL_S) as answer:
                return json.loads(answer.read() or b"null")
        except HTTPError as error:
            if error.code == 404:
                raise RuntimeError(f"{self.url} has no /{path.partition('?')[0]}; {START}") from error
            raise RuntimeError(f"{self.url}: {_reason(error)}") from error
        except (OSError, HTTPException, json.JSONDecodeError) as error:
            reason = getattr(error, "reason", error)
            raise RuntimeError(f"{self.url} does not answer like vLLM ({reason}); does vLLM run there?") from error

    @property
    def label(self) -> str:
        """The weight version that the server reports."""
        version: str = self.call("weight_info", post=False)["weight_version"]
        return version

    @label.setter
    def label(self, version: str) -> None:
        self.call("update_weight_version", {"new_version": version})

    def join(self, setup: BridgeSetup, engine: int) -> None:
        info = {"setup": setup.as_dict(), "engine": engine}
        self.call("init_weight_transfer_engine", {"init_info": info}, waits=True)

    def take(self, version: int) -> None:
        self.call("start_weight_update")
        self.call("update_weights", {"update_info": {"version": version}}, waits=True)

    def end_session(self) -> None:
        """End the update that an earlier push left open if it broke off or was killed.

        vLLM refuses to finish an update that is not open. If several ranks raise an error, it reads only the first one,
        and takes the others for results of later calls. So the ranks are asked first whether an update is open."""
        flags = self.call("collective_rpc", {"method": "__getattr__", "args": ["_weight_update_active"]})["results"]
        if "True" in flags:
            with suppress(RuntimeError):  # the update is not open on the last rank, which raised the push's error
                self.call("finish_weight_update")
        self.call("shutdown_weight_transfer_engine")

    def give_up(self, label: str) -> None:
        """Clean up after a push that failed. Errors here are ignored, because the caller raises the first error."""
        with suppress(RuntimeError):
            self.end_session()
        with suppress(RuntimeError):
            self.label = label


def _reason(error: HTTPError) -> str:
    """vLLM's error message, without the texts that its layers add."""
    text = error.read().decode(errors="replace")
    try:
        reported = json.loads(text)["error"]
        text = reported["message"] if isinstance(reported, dict) else reported
    except (ValueError, KeyError, TypeError):
        pass
    text = text.removeprefix("Call to collective_rpc method failed: ") or str(error)
    worker = re.fullmatch(r"Worker failed with error ['\"](.*)['\"], please check the stack trace.*", text, re.DOTALL)
    return worker[1] if worker else text


def parameters(source: Source) -> dict[str, Tensor]:
    """The parameters of a trainer with one rank, by Megatron's names. Tensors that are stored in the same form are
    mapped from the file; fused tensors are put together in memory.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    maps = Maps(source.checksums)
    targets = (source.tensor(chunk.tensor, None) for chunk in open_chunks(source.shape))
    return {target.name: _make_tensor(target, maps) for target in targets}


def _make_tensor(target: TargetTensor, maps: Maps) -> Tensor:
    first = target.parts[0]
    if first.source.extents == target.extents and first.source.dtype == target.dtype:
        return maps.tensor(first.source)
    return torch.cat([block.clone() for block in blocks(target, maps)])


def started(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Start the calls at once, each in a daemon thread, so that the program can end without waiting for them."""
    futures: list[Future[Any]] = [Future() for _ in calls]
    for future, call in zip(futures, calls, strict=True):
        threading.Thread(target=_settle, args=(future, call), daemon=True).start()
    return futures


def results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Wait for the results.

    Raises:
        RuntimeError: a call failed. The message also has the errors of others that fail within GRACE_S.
    """
    if any(future.exception() for future in wait(futures, return_when=FIRST_EXCEPTION).done):
        done = wait(futures, GRACE_S).done
        errors = [str(future.exception()) for future in futures if future in done and future.exception()]
        raise RuntimeError("; ".join(dict.fromkeys(errors)))
    return [future.result() for future in futures]


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except Exception as error:  # `results` raises it
        future.set_exception(error)


@contextmanager
def paused(servers: Sequence[Server]) -> Iterator[None]:
    """Pause the servers inside the block. Requests wait, and continue after it."""
    held = []
    try:
        for server in servers:
            server.call("pause?mode=keep")
            held.append(server)
        yield
    finally:
        for server in held:
            try:
                server.call("resume")
            except RuntimeError as error:
                print(f"a server is still paused: {error}", file=sys.stderr)


def push(servers: Sequence[Server], source: Source, version: int, host: str, timeout_s: float) -> dict[str, Any]:
    """Push to all servers.

    Raises:
        RuntimeError: the push broke off. The weight versions that the servers report say what they hold.
    """
    weights = parameters(source)
    engines = replace(servers[0].engines, num=len(servers))
    setup = BridgeSetup(source.shape.served, Mesh(), True, engines, servers[0].dtype, host, timeout_s=timeout_s)
    start = time.perf_counter()
    with paused(servers):
        sender = _join(servers, setup, weights, f"mixed until version {version} has arrived whole")
        metrics = _move(servers, sender, version)
        for server in servers:
            server.call("reset_prefix_cache?reset_running_requests=true")
            server.call("finish_weight_update", {"weight_version": str(version)})
            server.call("shutdown_weight_transfer_engine")
        sender.close()
    return {
        "version": version,
        "num_servers": len(servers),
        "tensor": engines.tensor,
        "pipeline": engines.pipeline,
        "expert_parallel": engines.expert_parallel,
        "dtype": setup.dtype,
        "num_bytes": sender.num_bytes,
        "push_s": metrics["seconds"],
        "paused_s": time.perf_counter() - start,
    }


def _join(
    servers: Sequence[Server], setup: BridgeSetup, weights: dict[str, Tensor], label_until_then: str
) -> BridgeSender:
    labels = [server.label for server in servers]
    stores = [host_store(setup.host, setup.timeout_s)]
    setup = replace(setup, port=stores[0].port)
    calls: list[Future[Any]] = []
    try:
        for server in servers:
            server.end_session()
            server.label = label_until_then
        joins = [partial(server.join, setup, i) for i, server in enumerate(servers)]
        calls = started(partial(BridgeSender, setup, 0, weights), *joins)
        sender: BridgeSender = results(calls)[0]
        return sender
    except BaseException as error:
        stores.clear()  # without the store, the servers that wait for others fail at once
        wait(calls, GRACE_S)
        lost = bool(calls) and any(
            server.on_cpu for server in servers
        )  # on a CPU, joining undoes vLLM's weight packing
        for server, label in zip(servers, labels, strict=True):
            server.give_up(BROKEN_OFF if lost else label)
        raise RuntimeError(f"{_describe(error)}; {BROKEN if lost else 'no weight has changed'}") from error


def _move(servers: Sequence[Server], sender: BridgeSender, version: int) -> Metrics:
    calls = started(partial(sender.push, version), *[partial(server.take, version) for server in servers])
    try:
        metrics: Metrics = results(calls)[0]
        return metrics
    except BaseException as error:
        for server in servers:
            server.give_up(BROKEN_OFF)
        wait(calls, GRACE_S)
        sender.close()
        raise RuntimeError(f"{_describe(error)}; {BROKEN}") from error


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


def address_towards(servers: Sequence[Server]) -> str:
    """The address of this machine that the servers can reach."""
    seen: list[str] = []
    for server in servers:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((server.host, 9))  # connecting a UDP socket sends nothing
            seen.append(probe.getsockname()[0])
    return next((address for address in seen if not address.startswith("127.")), seen[0])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the checkpoint's folder")
    parser.add_argument("servers", nargs="+", metavar="URL", help="the address of a server")
    parser.add_argument("--version", type=int, default=1, help="the version that the servers will report; default: 1")
    parser.add_argument("--host", help="this machine's address, as the servers reach it; default: found automatically")
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="time-out of joining and of the push; default: 300"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    try:
        source = open_checkpoint(given.folder)
        servers = [Server(url, given.timeout_s) for url in given.servers]
        for server in servers[1:]:
            if (server.engines, server.dtype) != (servers[0].engines, servers[0].dtype):
                raise ValueError(
                    f"{server.url} is {server.engines} in {server.dtype}, but {servers[0].url} is "
                    f"{servers[0].engines} in {servers[0].dtype}; push to servers of one layout at a time"
                )
        report = push(servers, source, given.version, given.host or address_towards(servers), given.timeout_s)
    except (ValueError, OSError, RuntimeError) as error:
        return failed(error)
    if given.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['num_servers']} servers hold version {given.version}: {report['num_bytes']:,} bytes in "
            f"{report['push_s']:.2f} s, paused for {report['paused_s']:.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
