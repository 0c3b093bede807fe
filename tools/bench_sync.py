"""Measure a push of new weights, and compare it with its upper bounds and with gathering full tensors.

A random model of about one gigabyte in bf16 is on Megatron ranks (TP2 x PP2) and is pushed to a vLLM engine (TP2). Each
rank is a process, and the engine's parameters are those that vLLM's own model class builds. The following methods run
in turns, and the best turn of each counts:

    plain          each pair sends as many bytes from one buffer into another over gloo: the fastest that gloo allows
    bridge         the push over gloo
    memcpy         one process copies as many bytes as the engine receives
    shared memory  the push through memory that both sides map
    gather         each stage all-gathers its tensors over TP, its first rank broadcasts the full Hugging Face tensors
                   to the engine's ranks, and vLLM's load_weights cuts them
    gather, all    the same, but every rank receives every tensor

Gathering keeps its buffers from turn to turn, as a caching allocator does. The tool fails if gathering and the bridge
leave different bits in the engine. Peak memory is the largest memory of a rank (VmHWM) from before joining until the
end of the first push, minus its memory before joining, and without the buffers of other ranks that an engine rank maps.
CPU time is that of a rank with all its threads, divided by the messages of its push, in the turn with the least of it.
With small messages (--gigabytes 0.3 --bucket-mib 0.0625) it is what a message costs beside its bytes.

    python tools/bench_sync.py --json
    python tools/bench_sync.py --gigabytes 4 --bucket-mib 64
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from megatron_rl.bridge.checksum import checksum
from megatron_rl.bridge.intake import Intake, Parameters
from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.bridge.setup import BUCKET_BYTES, BridgeSetup
from megatron_rl.layout import FAMILIES, Engines, megatron_shards, read_shape, slices
from megatron_rl.layout.shards import local_extents
from megatron_rl.types import Mesh

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LAYER_BYTES = 2 * (2560 * 128 * (2 * 32 + 2 * 8) + 3 * 2560 * 9728)
MESH, ENGINES = Mesh(tensor=2, pipeline=2), Engines(1, tensor=2)
WAYS = ("plain", "bridge", "memcpy", "shared memory", "gather", "gather, all")
DEADLINE = timedelta(seconds=600)


class Rank:
    """What a trainer rank and an engine rank have in common."""

    receives: bool
    """Whether this is an engine rank; trainer ranks send."""

    def __init__(self, setup: BridgeSetup, rank: int) -> None:
        self.setup, self.rank, self.version, self.ends, self.kept = setup, rank, 0, {}, {}
        self.store = TCPStore(setup.host, setup.port, is_master=False, timeout=DEADLINE)
        self.everyone = self.group("all", range(setup.world_size))
        trainers, width = setup.mesh.world_size, setup.mesh.tensor
        self.stages = [range(first, first + width) for first in range(0, trainers, width)]
        engine = range(trainers, setup.world_size)
        self.to_engine = [self.group(f"to engine {stage[0]}", [stage[0], *engine]) for stage in self.stages]

    def group(self, name: str, ranks: range | list[int]) -> ProcessGroupGloo | None:
        if self.rank not in ranks:
            return None
        store = PrefixStore(f"bench/{name}", self.store)
        return ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), DEADLINE)

    def room(self, key: str, extents: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        if key not in self.kept:
            self.kept[key] = torch.zeros(extents, dtype=dtype)
        return self.kept[key]

    def held(self) -> dict[str, int]:
        """The memory of this process in bytes: VmRSS is the present one, VmHWM the largest so far, RssShmem the shared
        part."""
        status = Path("/proc/self/status").read_text()
        return {name: int(kib) * 1024 for name, kib in re.findall(r"(VmRSS|VmHWM|RssShmem):\s+(\d+) kB", status)}

    def join(self, way: str) -> int:
        """Join the bridge, do a first push, and return the peak memory minus the memory before."""
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, shared = self.held(), way == "shared memory"
        self.ends[way] = self.open(replace(self.setup, share_memory=shared, epoch=int(shared)))
        self.push(way)
        after = self.held()
        others = after["RssShmem"] - before["RssShmem"] if shared and self.receives else 0
        return after["VmHWM"] - before["VmRSS"] - others

    def plain(self) -> None:
        """Send or receive all bytes at once, in pieces of one bucket."""
        works = [
            self.exchange([piece], peer, tag)
            for peer, buffer in self.buffers.items()
            for tag, piece in enumerate(buffer.split(self.setup.bucket_bytes))
        ]
        for work in works:
            work.wait()

    def run(self, way: str) -> tuple[float, float]:
        """The seconds that this method takes from the moment at which all ranks are ready, and the CPU seconds of this
        process in them."""
        if way == "plain":
            self.buffers = {peer: self.room(f"to {peer}", (size,), torch.uint8) for peer, size in self.routes.items()}
        self.everyone.barrier().wait()
        start, cpu = time.perf_counter(), time.process_time()
        if way == "plain":
            self.plain()
        elif way == "memcpy":
            self.memcpy()
        elif way.startswith("gather"):
            self.gather(everybody=way == "gather, all")
        else:
            self.push(way)
        return time.perf_counter() - start, time.process_time() - cpu

    def counts(self, way: str) -> tuple[int, int]:
        """The messages of this rank in a push, and their answers."""
        stretches = self.ends[way].stretches
        return sum(len(stretch.messages) for stretch in stretches), len(stretches)


class Trainer(Rank):
    receives = False

    def __init__(self, setup: BridgeSetup, rank: int, folder: str) -> None:
        super().__init__(setup, rank)
        self.shards = [megatron_shards(setup.shape, setup.mesh, mate) for mate in range(setup.mesh.world_size)]
        own = torch.Generator().manual_seed(rank)
        self.parameters = {
            name: torch.rand(extents, generator=torch.Generator().manual_seed(7) if "norm" in name else own).bfloat16()
            for name, extents in local_extents(self.shards[rank]).items()
        }
        self.stage = rank // setup.mesh.tensor
        groups = [self.group(f"stage {number}", stage) for number, stage in enumerate(self.stages)]
        self.mates, self.tensor_group = self.stages[self.stage], groups[self.stage]
        sent = setup.transfer_plan.sent_by(rank).items()
        self.routes = {setup.mesh.world_size + to: sum(copy.num_bytes for copy in copies) for to, copies in sent}
        self.exchange = self.everyone.send

    def open(self, setup: BridgeSetup) -> BridgeSender:
        return BridgeSender(setup, self.rank, self.parameters)

    def push(self, way: str) -> None:
        self.version += 1
        self.ends[way].push(self.version)

    def memcpy(self) -> None:
        """Only the engine copies."""

    def close(self) -> None:
        """The end of the process frees everything."""

    def gather(self, everybody: bool) -> None:
        for stage, mates in enumerate(self.stages):
            for name, extents in stage_tensors(self.setup, self.shards, mates):
                full = self.full(name, extents) if stage == self.stage else self.room(name, extents)
                if everybody:
                    broadcast(self.everyone, full, mates[0])
                elif self.rank == mates[0]:
                    broadcast(self.to_engine[stage], full, 0)
        self.gathered = {}

    def full(self, name: str, extents: tuple[int, ...]) -> Tensor:
        """The Hugging Face tensor, gathered from all ranks of the stage. A fused parameter is gathered only once."""
        full = self.room(name, extents)
        for mate in self.mates:
            for shard in self.shards[mate]:
                if shard.hf_name == name:
                    part = self.gather_parameter(shard.local_name)[mate - self.mates[0]]
                    full[slices(shard.hf_box)] = part[slices(shard.local_box)]
        return full

    def gather_parameter(self, local_name: str) -> list[Tensor]:
        if local_name not in self.gathered:
            mine = self.parameters[local_name]
            parts = [self.room(f"{local_name} of {mate}", mine.shape) for mate in self.mates]
            self.tensor_group.allgather([parts], [mine]).wait()
            self.gathered = {local_name: parts}
        return self.gathered[local_name]

    gathered: dict[str, list[Tensor]] = {}


class Engine(Rank):
    receives = True

    def __init__(self, setup: BridgeSetup, rank: int, folder: str) -> None:
        super().__init__(setup, rank)
        self.index = rank - setup.mesh.world_size
        self.model = vllm_model(folder, setup.engines.tensor, self.index, f"tcp://127.0.0.1:{free_port(self)}")
        self.parameters = dict(self.model.named_parameters())
        self.shards = [megatron_shards(setup.shape, setup.mesh, mate) for mate in range(setup.mesh.world_size)]
        received = setup.transfer_plan.received_by(self.index).items()
        self.routes = {source: sum(copy.num_bytes for copy in copies) for source, copies in received}
        self.exchange = self.everyone.recv
        for name in ("source", "target"):  # the buffers of memcpy
            self.room(name, (sum(self.routes.values()),), torch.uint8).fill_(1)
        self.forget()  # writing to the parameters allocates their pages before memory is first measured

    def open(self, setup: BridgeSetup) -> Intake:
        return Intake(setup, 0, self.index, Parameters(self.parameters), torch.device("cpu"))

    def push(self, way: str) -> None:
        self.version += 1
        self.ends[way].receive(self.version)

    def memcpy(self) -> None:
        """The first rank copies as many bytes as all ranks of the engine receive."""
        if self.index == 0:
            for _ in range(self.setup.engines.world_size):
                self.kept["target"].copy_(self.kept["source"])

    def gather(self, everybody: bool) -> None:
        bucket, size = [], 0
        for stage, mates in enumerate(self.stages):
            for name, extents in stage_tensors(self.setup, self.shards, mates):
                full = self.room(name, extents)
                broadcast(self.everyone if everybody else self.to_engine[stage], full, mates[0] if everybody else 0)
                bucket.append((name, full))
                size += full.nbytes
                if size >= self.setup.bucket_bytes:
                    self.model.load_weights(bucket)
                    bucket, size = [], 0
        self.model.load_weights(bucket)

    def sums(self) -> list[tuple[int, int]]:
        """The checksums of all parameters."""
        return [checksum(parameter.detach().view(-1).view(torch.uint8)) for parameter in self.parameters.values()]

    def close(self) -> None:
        """Free vLLM's shared memory, which would outlive the process."""
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()

    @torch.no_grad()
    def forget(self) -> None:
        for parameter in self.parameters.values():
            parameter.zero_()


def stage_tensors(setup: BridgeSetup, shards: list, mates: range) -> list[tuple[str, tuple[int, ...]]]:
    """The names and extents of a stage's Hugging Face tensors, in the order of its parameters."""
    extents = FAMILIES[setup.shape.family].hf_tensors(setup.shape)
    return [(name, extents[name]) for name in dict.fromkeys(shard.hf_name for shard in shards[mates[0]])]


def broadcast(group: ProcessGroupGloo, tensor: Tensor, root: int) -> None:
    options = BroadcastOptions()
    options.rootRank = root
    group.broadcast([tensor], options).wait()


def free_port(engine: Engine) -> int:
    """A free port, which the engine's first rank finds and the others read from the store."""
    import socket

    if engine.index == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            engine.store.set("bench/port", str(probe.getsockname()[1]))
    return int(engine.store.get("bench/port"))


def vllm_model(folder: str, tensor: int, rank: int, url: str) -> torch.nn.Module:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", "VLLM_DIST_IDENT": url[-5:]}
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    options = dict(skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64)
    config = EngineArgs(
        model=folder, tensor_parallel_size=tensor, distributed_executor_backend="mp", **options
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        parallel_state.init_distributed_environment(tensor, rank, url, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(tensor, backend="gloo")
        return initialize_model(config).eval()


def serve(setup: BridgeSetup, rank: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    kind = Trainer if rank < setup.mesh.world_size else Engine
    try:
        served = kind(setup, rank, folder)
        pipe.send(sum(parameter.nbytes for parameter in served.parameters.values()))
        while (call := pipe.recv()) is not None:
            pipe.send(getattr(served, call[0])(*call[1:]))
        served.close()
    except Exception:
        pipe.send(RuntimeError(f"rank {rank}: {traceback.format_exc()}"))


def ask(pipes: list[Connection], *call: object) -> list:
    for pipe in pipes:
        pipe.send(call)
    return [answer(pipe) for pipe in pipes]


def answer(pipe: Connection) -> object:
    received = pipe.recv()
    if isinstance(received, Exception):
        raise received
    return received


def measure(gigabytes: float, bucket_bytes: int, repeats: int) -> dict:
    embeddings = 2 * 2 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    layers = MESH.pipeline * max(1, round((gigabytes * 1e9 - embeddings) / LAYER_BYTES / MESH.pipeline))
    store = host_store("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        setup = BridgeSetup(
            read_shape(Path(folder)),
            MESH,
            False,
            ENGINES,
            "bfloat16",
            "127.0.0.1",
            store.port,
            bucket_bytes=bucket_bytes,
            timeout_s=DEADLINE.total_seconds(),
        )
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for rank in range(setup.world_size):
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(setup, rank, folder, theirs), daemon=True))
            processes[-1].start()
            pipes.append(mine)
        try:
            return compare(setup, pipes, repeats) | {"layers": layers, "repeats": repeats}
        finally:
            for pipe, process in zip(pipes, processes, strict=True):
                with suppress(OSError):  # the process has failed and reported its error
                    pipe.send(None)
                process.join(10)
                process.kill()


def compare(setup: BridgeSetup, pipes: list[Connection], repeats: int) -> dict:
    held = [answer(pipe) for pipe in pipes]
    engine, trainers = pipes[setup.mesh.world_size :], setup.mesh.world_size
    peaks = {way: ask(pipes, "join", way) for way in ("bridge", "shared memory")}
    expected = ask(engine, "sums")
    counts = {way: ask(pipes, "counts", way) for way in peaks}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[list[float]]] = {way: [] for way in peaks}
    for _ in range(repeats):
        for way in WAYS:
            if way not in ("plain", "memcpy"):
                ask(engine, "forget")
            took = ask(pipes, "run", way)
            seconds[way].append(max(wall for wall, _ in took))
            if way in cpu:
                cpu[way].append([used / number for (_, used), (number, _) in zip(took, counts[way], strict=True)])
            if ask(engine, "sums") != expected:
                raise SystemExit(f"{way}: the engine's weights differ from those after the first push")
    best = {way: min(times) for way, times in seconds.items()}
    taken = setup.transfer_plan.engine_bytes.astype(int).tolist()
    gathered = sum(map(int, held[trainers:]))
    return {
        "engine_bytes": held[trainers:],
        "received_bytes": taken,
        "bucket_bytes": setup.bucket_bytes,
        "seconds": best,
        "gigabytes_per_s": {way: gathered / best[way] / 1e9 for way in WAYS},
        "bridge_over_plain": best["plain"] / best["bridge"],
        "gather_over_bridge": best["gather"] / best["bridge"],
        "gather_all_over_bridge": best["gather, all"] / best["bridge"],
        "shared_over_memcpy": best["memcpy"] / best["shared memory"],
        "messages": {way: [number for number, _ in each] for way, each in counts.items()},
        "answers": {way: [answers for _, answers in each] for way, each in counts.items()},
        "cpu_s_per_message": {way: [min(ranks) for ranks in zip(*turns, strict=True)] for way, turns in cpu.items()},
        "peak_buckets": {way: [peak / setup.bucket_bytes for peak in each] for way, each in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--bucket-mib", type=float, default=BUCKET_BYTES / 2**20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    report = measure(options.gigabytes, int(options.bucket_mib * 2**20), options.repeats)
    if options.json:
        print(json.dumps(report))
        return
    for way in WAYS:
        print(f"{way:14} {report['seconds'][way]:8.3f} s {report['gigabytes_per_s'][way]:8.2f} GB/s")
    print(f"engine ranks hold {report['engine_bytes']} bytes and receive {report['received_bytes']}")
    print(f"the bridge reaches {report['bridge_over_plain']:.2f} of the rate of plain sends")
    print(f"the push through shared memory reaches {report['shared_over_memcpy']:.2f} of the rate of memcpy")
    print(f"gathering takes {report['gather_over_bridge']:.1f} times as long as the bridge")
    print(f"gathering on all ranks takes {report['gather_all_over_bridge']:.1f} times as long as the bridge")
    for way, numbers in report["messages"].items():
        for rank, number in enumerate(numbers):
            side = "trainer" if rank < MESH.world_size else "engine"
            used, answers = report["cpu_s_per_message"][way][rank], report["answers"][way][rank]
            print(f"{way:14} {side:7} rank: {number} messages, {answers} answers, {1e6 * used:.0f} us of CPU a message")
    for way, peaks in report["peak_buckets"].items():
        print(f"peak memory of each rank in buckets, {way:14}  {', '.join(f'{peak:.2f}' for peak in peaks)}")


if __name__ == "__main__":
    main()
