"""The processes of the bridge's benchmarks: one for each trainer rank and each engine rank.

The driver (tools/bench/sync.py) starts all ranks with `started` and asks them by `ask`; calls and answers are lines of
JSON over a rank's stdin and stdout. A trainer rank holds random weights. An engine rank holds the parameters of the
family's table, which tests/ranks/test_layout_families.py compares with what vLLM builds.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work

from megatron_rl.bridge.checksum import checksum
from megatron_rl.bridge.intake import Intake, Parameters
from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.line import MessageGroup
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.config.package_files import PACKAGE
from megatron_rl.layout import TransferPlan
from megatron_rl.models import megatron_shards, vllm_shards
from megatron_rl.models.shards import local_extents

DEADLINE = timedelta(seconds=600)
ALIGNMENT = 32
"""Parameters begin at multiples of 64 bytes, as tensors of their own do."""
NUM_ANSWERS = 200


def hops(plan: TransferPlan) -> dict[tuple[int, int], int]:
    """The bytes of a push between each two ranks. Trainer ranks come first; engines in a chain feed the next one."""
    found: dict[tuple[int, int], int] = {}
    first, world = plan.num_sources, plan.engines.world_size
    for source in range(first):
        for to, copies in plan.sent_by(source).items():
            found[source, first + to] = sum(copy.num_bytes for copy in copies)
    for feed in plan.engines.feeds:
        for rank in range(world):
            sender, receiver = (first + engine * world + rank for engine in (feed.source, feed.destination))
            found[sender, receiver] = int(plan.engine_bytes[rank])
    return found


class AllRanks(MessageGroup, Protocol):
    def barrier(self) -> Work: ...


class Rank:
    """One rank, trainer or engine, with all its parameters (bfloat16) in one piece of memory."""

    def __init__(self, setup: BridgeSetup, rank: int) -> None:
        self.setup, self.rank, self.version = setup, rank, 0
        self.index = rank - setup.mesh.world_size
        """The engine rank; negative on a trainer rank."""
        self.ends: dict[str, Any] = {}
        store = TCPStore(setup.host, setup.port, is_master=False, timeout=DEADLINE)
        self.store = PrefixStore("bench", store)
        self.parameters = self.make_parameters()
        self.hops = hops(setup.transfer_plan)
        gloo: Any = ProcessGroupGloo  # torch's types lack what it does
        self.everyone: AllRanks = gloo(PrefixStore("all", self.store), rank, setup.world_size, DEADLINE)

    def make_parameters(self) -> dict[str, Tensor]:
        setup, engines = self.setup, self.setup.engines
        if self.index < 0:
            shards = megatron_shards(setup.shape, setup.mesh, self.rank)
        else:
            shards = vllm_shards(
                setup.shape, engines.tensor, self.index % engines.world_size, engines.expert_parallel, engines.pipeline
            )
        extents = local_extents(shards)
        sizes = {name: -(-math.prod(each) // ALIGNMENT) * ALIGNMENT for name, each in extents.items()}
        self.flat = torch.zeros(sum(sizes.values()), dtype=torch.bfloat16)
        parts = dict(zip(extents, torch.split(self.flat, list(sizes.values())), strict=True))
        parameters = {name: parts[name][: math.prod(each)].view(each) for name, each in extents.items()}
        for name, parameter in parameters.items() if self.index < 0 else ():
            seed = 7 if "norm" in name else self.rank  # the ranks of a stage have the same norms
            parameter.uniform_(generator=torch.Generator().manual_seed(seed))
        return parameters

    def held_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters.values())

    def sums(self) -> list[list[int]]:
        """The checksums of all parameters."""
        return [list(checksum(value.detach().view(-1).view(torch.uint8))) for value in self.parameters.values()]

    @torch.no_grad()
    def forget(self) -> None:
        if self.index >= 0:
            for parameter in self.parameters.values():
                parameter.zero_()

    def join(self, way: str) -> int:
        """Join the bridge and do a first push.

        Returns:
            the largest memory (VmHWM) of this process during both, minus its memory before, without the buffers of
            other ranks that an engine rank maps; in bytes.
        """
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, shared = _memory(), way == "shared memory"
        setup = replace(self.setup, share_memory=shared, epoch=int(shared))
        if self.index < 0:
            self.ends[way] = BridgeSender(setup, self.rank, self.parameters)
        else:
            engine, within = divmod(self.index, setup.engines.world_size)
            parameters = Parameters(self.parameters)
            self.ends[way] = Intake(setup, engine, within, parameters, torch.device("cpu"))
        self.push(way)
        after = _memory()
        mapped = after["RssShmem"] - before["RssShmem"] if shared and self.index >= 0 else 0
        return after["VmHWM"] - before["VmRSS"] - mapped

    def run(self, way: str) -> list[float]:
        """The seconds that a way takes from the moment at which all ranks are ready, and the CPU seconds of this rank,
        including gloo's thread."""
        self.everyone.barrier().wait()
        start, before = time.perf_counter(), time.process_time()
        self.carry_out(way)
        return [time.perf_counter() - start, time.process_time() - before]

    def carry_out(self, way: str) -> None:
        """One of plain and memcpy, or a push over a bridge that this rank has joined."""
        known = {"plain": self.plain, "memcpy": self.memcpy}
        if way in known:
            known[way]()
        else:
            self.push(way)

    def push(self, way: str) -> None:
        self.version += 1
        end = self.ends[way]
        if self.index < 0:
            end.push(self.version)
        else:
            end.receive(self.version)

    def plain(self) -> None:
        """Send and receive as many bytes as a push, all at once, in pieces of a bucket, from and to the parameters'
        memory. A rank that receives less than it holds begins with its first bytes; so does one that sends."""
        own, works = self.flat.view(torch.uint8), []
        begin = {"out": 0, "in": 0}
        for (sender, receiver), num_bytes in self.hops.items():
            if self.rank not in (sender, receiver):
                continue
            side, peer, transfer = (
                ("out", receiver, self.everyone.send) if self.rank == sender else ("in", sender, self.everyone.recv)
            )
            for tag, size in enumerate(_pieces(num_bytes, self.setup.bucket_bytes)):
                start = begin[side] if begin[side] + size <= own.numel() else 0
                works.append(transfer([own[start : start + size]], peer, tag))
                begin[side] = start + size
        for work in works:
            work.wait()

    def memcpy(self) -> None:
        """Each engine rank copies as many bytes as it receives."""
        if self.index >= 0:
            half = self.flat.numel() // 2
            for _ in range(2):
                self.flat[:half].copy_(self.flat[half : 2 * half])

    def answers(self) -> float:
        """The seconds that an answer takes between the two ranks of the first route, while the others wait: the mean of
        many in turns."""
        ends, number = next(iter(self.hops)), torch.zeros(2, dtype=torch.int64)
        self.everyone.barrier().wait()
        start = time.perf_counter()
        if self.rank in ends:
            peer = ends[1 - ends.index(self.rank)]
            for turn in range(NUM_ANSWERS):
                step = self.everyone.send if (turn % 2 == 0) == (self.rank == ends[0]) else self.everyone.recv
                step([number], peer, 0).wait()
        seconds = (time.perf_counter() - start) / NUM_ANSWERS
        self.everyone.barrier().wait()
        return seconds


def _pieces(num_bytes: int, largest: int) -> list[int]:
    return [min(largest, num_bytes - start) for start in range(0, num_bytes, largest)]


def _memory() -> dict[str, int]:
    """The memory of this process in bytes: VmRSS is the present one, VmHWM the largest so far, RssShmem the shared
    part."""
    status = Path("/proc/self/status").read_text()
    return {name: int(kib) * 1024 for name, kib in re.findall(r"(VmRSS|VmHWM|RssShmem):\s+(\d+) kB", status)}


def serve() -> None:
    """Be one rank: answer each line of stdin with a line on stdout. The first line says which rank; for rank 0 it
    follows a line that requests a store."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    served: Rank | None = None
    stores = []
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            if name == "store":
                stores.append(host_store(arguments[0], DEADLINE.total_seconds()))
                result: Any = stores[-1].port
            elif name == "begin":
                served = Rank(BridgeSetup.from_dict(arguments[0]), *arguments[1:])
                result = None
            else:
                result = getattr(served, name)(*arguments)
            said = {"result": result}
        except Exception:  # the driver raises it
            said = {"error": traceback.format_exc()}
        print(json.dumps(said), file=answers, flush=True)


class RankProcess:
    """The driver's end of one rank."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=dict(environment))

    def tell(self, *call: object) -> None:
        assert self.process.stdin
        try:
            print(json.dumps(call), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise RuntimeError(f"a rank of the benchmark ended with status {self.process.wait()}") from None

    def answer(self) -> Any:
        assert self.process.stdout
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"a rank of the benchmark ended with status {self.process.wait()}")
        said = json.loads(line)
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["result"]


def ask(processes: Sequence[RankProcess], *call: object) -> list[Any]:
    """Call a method on several ranks at the same time.

    Raises:
        RuntimeError: it failed on one of them.
    """
    for process in processes:
        process.tell(*call)
    return [process.answer() for process in processes]


@contextmanager
def started(
    setup: BridgeSetup,
    prefixes: Sequence[Sequence[str]] = (),
    host: str = "127.0.0.1",
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[RankProcess]]:
    """All ranks of a setup, each in a process, ended together.

    Args:
        prefixes: for each rank the words that run a command where it belongs; empty: all run here.
        host: the address of rank 0, as the others reach it.
    """
    code = f"from {__name__} import serve; serve()"
    here = {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])}
    variables = os.environ | here | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
    processes: list[RankProcess] = []
    try:
        for rank in range(setup.world_size):
            prefix = prefixes[rank] if prefixes else []
            processes.append(RankProcess([*prefix, sys.executable, "-c", code], variables))
        [port] = ask(processes[:1], "store", host)
        setup = replace(setup, host=host, port=port)
        for rank, process in enumerate(processes):
            process.tell("begin", setup.as_dict(), rank)
        for process in processes:
            process.answer()
        yield processes
    finally:
        for process in processes:
            process.process.kill()
        for process in processes:
            process.process.wait()
