"""Give running vLLM servers the weights of a checkpoint, without restarting them.

Every server takes its own shards over the bridge, straight into its live parameters; what it is asked meanwhile waits.
The checkpoint is a Hugging Face folder, or what hf_to_megatron.py wrote. All servers have the same model and the same
layout, which is read from them. Each is started with

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "megatron_rl"}'

in an environment where this package is installed. --load-format dummy spares it the weights that it begins with.

    python tools/push_checkpoint.py runs/tiny/hf http://localhost:8000
    python tools/push_checkpoint.py models/Qwen3-32B http://node1:8000 http://node2:8000 --version 3 --json

Until the whole push has arrived, GET /weight_info of a server says that its weights are mixed. If this program is
killed, the servers stay paused until the next push. The exit code is 0, or 1 with the reason.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # an error is a line here, not the store's stack

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
from megatron_rl.convert.stored import Maps
from megatron_rl.convert.target import TargetTensor, blocks
from megatron_rl.layout import Engines
from megatron_rl.types import Mesh, Metrics

START = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "megatron_rl"}\''
BROKEN = "the servers hold a mix of weights, and their answers mean nothing before a whole push has arrived: push again"
BROKEN_OFF = "mixed: a push broke off"
"""The label of such weights."""
CONTROL_S = 60.0
"""For calls that wait for nobody; the first of /server_info takes seconds."""
GRACE_S = 2.0
"""After the first failure the other ends say why, if they know."""


class Server:
    """The HTTP endpoints of one `vllm serve`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.host = url.rstrip("/"), urlsplit(url).hostname
        if urlsplit(url).scheme not in ("http", "https") or not self.host:
            raise ValueError(f"{url} is no server's address; give one like http://localhost:8000")
        self.timeout_s = timeout_s
        config = self.call("server_info?config_format=json", post=False)["vllm_config"]
        backend = (config["weight_transfer_config"] or {}).get("backend")
        if backend != "megatron_rl":
            raise ValueError(f"{self.url} takes its weights by {backend or 'no transfer at all'}; {START}")
        parallel = config["parallel_config"]
        if parallel["data_parallel_size"] > 1:
            raise ValueError(f"{self.url} is data-parallel; give each replica a server of its own")
        self.engines = Engines(
            1,
            parallel["tensor_parallel_size"],
            parallel["pipeline_parallel_size"],
            parallel["enable_expert_parallel"],
        )
        self.dtype = config["model_config"]["dtype"].removeprefix("torch.")
        self.on_cpu = config["device_config"]["device"] == "cpu"

    def call(self, path: str, body: dict[str, Any] | None = None, *, post: bool = True, waits: bool = False) -> Any:
        """
        Args:
            waits: for the push, whose own deadline comes first.

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
            raise RuntimeError(f"{self.url} does not answer as vLLM does ({reason}); does it run there?") from error

    @property
    def label(self) -> str:
        return self.call("weight_info", post=False)["weight_version"]

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
        """End what an earlier push has left, if it broke off or was killed.

        vLLM refuses to finish an update that is not open; and of several ranks' errors it reads the first, and takes
        the others for those of later calls. So the ranks are asked before."""
        flags = self.call("collective_rpc", {"method": "__getattr__", "args": ["_weight_update_active"]})["results"]
        if "True" in flags:
            with suppress(RuntimeError):  # of the last rank, where the update is not open: it raised the push's error
                self.call("finish_weight_update")
        self.call("shutdown_weight_transfer_engine")

    def give_up(self, label: str) -> None:
        """What goes wrong here is the consequence of an error that is raised elsewhere."""
        with suppress(RuntimeError):
            self.end_session()
        with suppress(RuntimeError):
            self.label = label


def _reason(error: HTTPError) -> str:
    """vLLM's, without what its layers add."""
    text = error.read().decode(errors="replace")
    try:
        said = json.loads(text)["error"]
        text = said["message"] if isinstance(said, dict) else said
    except (ValueError, KeyError, TypeError):
        pass
    text = text.removeprefix("Call to collective_rpc method failed: ") or str(error)
    worker = re.fullmatch(r"Worker failed with error ['\"](.*)['\"], please check the stack trace.*", text, re.DOTALL)
    return worker[1] if worker else text


def parameters(source: Source) -> dict[str, Tensor]:
    """Of a trainer of one rank, by Megatron's names. Tensors that it holds as they are stored stay in the file, in the
    page cache; those that are fused of several are put together in memory.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    maps = Maps(source.checksums)
    targets = (source.tensor(chunk.tensor, None) for chunk in open_chunks(source.shape))
    return {target.name: _made(target, maps) for target in targets}


def _made(target: TargetTensor, maps: Maps) -> Tensor:
    first = target.parts[0]
    if first.source.extents == target.extents and first.source.dtype == target.dtype:
        return maps.tensor(first.source)
    return torch.cat([block.clone() for block in blocks(target, maps)])


def started(*calls: Callable[[], Any]) -> list[Future]:
    """The calls, side by side, each in a thread that nobody must wait for."""
    futures = [Future() for _ in calls]
    for future, call in zip(futures, calls, strict=True):
        threading.Thread(target=_settle, args=(future, call), daemon=True).start()
    return futures


def results(futures: Sequence[Future]) -> list[Any]:
    """
    Raises:
        RuntimeError: as soon as one has failed; with what others say within the grace.
    """
    if any(future.exception() for future in wait(futures, return_when=FIRST_EXCEPTION).done):
        done = wait(futures, GRACE_S).done
        errors = [str(future.exception()) for future in futures if future in done and future.exception()]
        raise RuntimeError("; ".join(dict.fromkeys(errors)))
    return [future.result() for future in futures]


def _settle(future: Future, call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except Exception as error:  # raised where the future is waited for
        future.set_exception(error)


@contextmanager
def paused(servers: Sequence[Server]) -> Iterator[None]:
    """Nothing is computed inside the block; requests wait, and go on after it."""
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
                print(f"still paused: {error}", file=sys.stderr)


def push(servers: Sequence[Server], source: Source, version: int, host: str, timeout_s: float) -> dict[str, Any]:
    """Push to all servers.

    Raises:
        RuntimeError: the push broke off; what the servers then hold stands in their labels.
    """
    weights = parameters(source)
    engines = replace(servers[0].engines, num=len(servers))
    setup = BridgeSetup(source.shape, Mesh(), True, engines, servers[0].dtype, host, timeout_s=timeout_s)
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
    calls: list[Future] = []
    try:
        for server in servers:
            server.end_session()
            server.label = label_until_then
        joins = [partial(server.join, setup, i) for i, server in enumerate(servers)]
        calls = started(partial(BridgeSender, setup, 0, weights), *joins)
        return results(calls)[0]
    except BaseException as error:
        stores.clear()  # without the store, those who wait for the others fail at once
        wait(calls, GRACE_S)
        lost = bool(calls) and any(server.on_cpu for server in servers)  # there, joining undoes vLLM's packing
        for server, label in zip(servers, labels, strict=True):
            server.give_up(BROKEN_OFF if lost else label)
        raise RuntimeError(f"{_said(error)}; {BROKEN if lost else 'no weight has changed'}") from error


def _move(servers: Sequence[Server], sender: BridgeSender, version: int) -> Metrics:
    calls = started(partial(sender.push, version), *[partial(server.take, version) for server in servers])
    try:
        return results(calls)[0]
    except BaseException as error:
        for server in servers:
            server.give_up(BROKEN_OFF)
        wait(calls, GRACE_S)
        sender.close()
        raise RuntimeError(f"{_said(error)}; {BROKEN}") from error


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def address_towards(servers: Sequence[Server]) -> str:
    """Of this machine, as the servers see it."""
    seen = []
    for server in servers:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((server.host, 9))  # sends nothing
            seen.append(probe.getsockname()[0])
    return next((address for address in seen if not address.startswith("127.")), seen[0])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("servers", nargs="+", metavar="URL")
    parser.add_argument("--version", type=int, default=1, help="what the servers call these weights; default: 1")
    parser.add_argument("--host", help="this machine's address for the servers; default: the one that leads to them")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of the joining, and of the push; default: 300")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    try:
        source = open_checkpoint(given.folder)
        servers = [Server(url, given.timeout_s) for url in given.servers]
        for server in servers[1:]:
            if (server.engines, server.dtype) != (servers[0].engines, servers[0].dtype):
                raise ValueError(
                    f"{server.url} is {server.engines} in {server.dtype}, {servers[0].url} is {servers[0].engines} in "
                    f"{servers[0].dtype}; push to servers of one layout at a time"
                )
        report = push(servers, source, given.version, given.host or address_towards(servers), given.timeout_s)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['num_servers']} servers hold version {given.version}: {report['num_bytes']:,} bytes in "
            f"{report['push_s']:.2f} s, paused for {report['paused_s']:.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
