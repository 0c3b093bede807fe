"""Measure what the bridge replaced: gathering full tensors, and cutting them again in the engine.

A random model in bf16 is on Megatron ranks (TP2 x PP2) and goes to one vLLM engine (TP2), whose parameters are those of
vLLM's own model class. The following methods run in turns, and the best turn of each counts:

    bridge       the push over gloo (tools/bench_sync.py measures it in other layouts)
    gather       each stage all-gathers its tensors over TP, its first rank broadcasts the full Hugging Face tensors to
                 the engine's ranks, and vLLM's load_weights cuts them
    gather, all  the same, but every rank receives every tensor
    all-gather   the all-gathers alone; gloo's are slow, so this much of the time says nothing about other networks

Gathering keeps its buffers from turn to turn, as a caching allocator does. The tool fails if a method leaves other bits
in the engine than the bridge.

    python tools/bench_gather.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.layout import FAMILIES, Links, megatron_shards, slices
from megatron_rl.tools.bench_sync import HERE, LAYOUTS, Size, config, make_setup, turns_of
from megatron_rl.tools.sync_ranks import Rank, ask, started

WAYS = ("bridge", "all-gather", "gather", "gather, all")
MODULE = "megatron_rl.tools.bench_gather"
"""The name of this module in the ranks, also when this process runs it as a program."""


class GatherRank(Rank):
    def __init__(self, setup: BridgeSetup, rank: int, folder: str) -> None:
        self.folder = folder
        super().__init__(setup, rank)
        trainers, width = setup.mesh.world_size, setup.mesh.tensor
        self.stages = [range(first, first + width) for first in range(0, trainers, width)]
        engine = range(trainers, setup.world_size)
        self.to_engine = [self.group(f"to engine {stage[0]}", [stage[0], *engine]) for stage in self.stages]
        groups = [self.group(f"stage {stage[0]}", stage) for stage in self.stages]
        self.stage = rank // width
        self.tensor_group = groups[self.stage] if self.index < 0 else None
        self.shards = [megatron_shards(setup.shape, setup.mesh, mate) for mate in range(trainers)]
        self.rooms: dict[str, Tensor] = {}
        self.gathered: dict[str, list[Tensor]] = {}

    def make_parameters(self) -> dict[str, Tensor]:
        if self.index < 0:
            return super().make_parameters()
        if self.index == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.store.set("vllm", str(probe.getsockname()[1]))
        url = f"tcp://127.0.0.1:{self.store.get('vllm').decode()}"
        self.model = vllm_model(self.folder, self.setup.engines.tensor, self.index, url)
        return dict(self.model.named_parameters())

    def carry_out(self, way: str) -> None:
        self.gathered = {}
        if way.startswith("gather"):
            gather = self.gather if self.index < 0 else self.load
            gather(everybody=way == "gather, all")
        elif way == "all-gather":
            for name in self.parameters if self.index < 0 else ():
                self.gather_parameter(name)
        else:
            super().carry_out(way)

    def room(self, key: str, extents: tuple[int, ...]) -> Tensor:
        if key not in self.rooms:
            self.rooms[key] = torch.zeros(extents, dtype=torch.bfloat16)
        return self.rooms[key]

    def gather(self, everybody: bool) -> None:
        """A trainer rank's part."""
        for stage, mates in enumerate(self.stages):
            for name, extents in self.stage_tensors(mates):
                full = self.full(name, extents) if stage == self.stage else self.room(name, extents)
                if everybody:
                    broadcast(self.everyone, full, mates[0])
                elif self.rank == mates[0]:
                    broadcast(self.to_engine[stage], full, 0)

    def load(self, everybody: bool) -> None:
        """An engine rank's part: it loads a bucket of tensors at a time."""
        bucket: list[tuple[str, Tensor]] = []
        for stage, mates in enumerate(self.stages):
            for name, extents in self.stage_tensors(mates):
                full = self.room(name, extents)
                broadcast(self.everyone if everybody else self.to_engine[stage], full, mates[0] if everybody else 0)
                bucket.append((name, full))
                if sum(tensor.nbytes for _, tensor in bucket) >= self.setup.bucket_bytes:
                    self.model.load_weights(bucket)
                    bucket = []
        self.model.load_weights(bucket)

    def full(self, name: str, extents: tuple[int, ...]) -> Tensor:
        """The Hugging Face tensor, gathered from all ranks of the stage. A fused parameter is gathered only once."""
        full, mates = self.room(name, extents), self.stages[self.stage]
        for mate in mates:
            for shard in self.shards[mate]:
                if shard.hf_name == name:
                    part = self.gather_parameter(shard.local_name)[mate - mates[0]]
                    full[slices(shard.hf_box)] = part[slices(shard.local_box)]
        return full

    def gather_parameter(self, local_name: str) -> list[Tensor]:
        if local_name not in self.gathered:
            mine = self.parameters[local_name]
            parts = [self.room(f"{local_name} of {mate}", mine.shape) for mate in self.stages[self.stage]]
            self.tensor_group.allgather([parts], [mine]).wait()
            self.gathered = {local_name: parts}
        return self.gathered[local_name]

    def stage_tensors(self, mates: range) -> list[tuple[str, tuple[int, ...]]]:
        """The names and extents of a stage's Hugging Face tensors, in the order of its parameters."""
        extents = FAMILIES[self.setup.shape.family].hf_tensors(self.setup.shape)
        return [(name, extents[name]) for name in dict.fromkeys(shard.hf_name for shard in self.shards[mates[0]])]

    def close(self) -> None:
        """Free vLLM's shared memory, which would outlive the process."""
        if self.index >= 0:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


def broadcast(group: ProcessGroupGloo, tensor: Tensor, root: int) -> None:
    options = BroadcastOptions()
    options.rootRank = root
    group.broadcast([tensor], options).wait()


def vllm_model(folder: str, tensor: int, rank: int, url: str) -> torch.nn.Module:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", "VLLM_DIST_IDENT": url[-5:]}
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    options = dict(skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64)
    engine = EngineArgs(
        model=folder, tensor_parallel_size=tensor, distributed_executor_backend="mp", **options
    ).create_engine_config()
    with set_current_vllm_config(engine), set_default_torch_dtype(torch.bfloat16):
        parallel_state.init_distributed_environment(tensor, rank, url, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(tensor, backend="gloo")
        return initialize_model(engine).eval()


def measure(size: Size, repeats: int) -> dict[str, Any]:
    layout = LAYOUTS["one-engine"]
    setup = make_setup(layout, size, Links(gpus_per_node=sum(layout.num_ranks)))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config(size.hidden, setup.shape.num_layers, False)))
        with started(setup, folder, module=MODULE, kind=GatherRank.__name__) as processes:
            turns, *_ = turns_of(processes, WAYS, repeats)
            ask(processes, "close")
    seconds = {way: min(times) for way, times in turns.items()}
    return {
        "engine_bytes": setup.transfer_plan.engine_bytes.astype(int).tolist(),
        "seconds": seconds,
        "gather_over_bridge": seconds["gather"] / seconds["bridge"],
        "gather_all_over_bridge": seconds["gather, all"] / seconds["bridge"],
        "all_gather_share": seconds["all-gather"] / seconds["gather"],
        "all_gather_share_of_all": seconds["all-gather"] / seconds["gather, all"],
        "repeats": repeats,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=HERE.gigabytes)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    report = measure(Size(HERE.hidden, options.gigabytes, HERE.bucket_bytes), options.repeats)
    if options.json:
        print(json.dumps(report))
        return 0
    for way, seconds in report["seconds"].items():
        print(f"{way:12} {seconds:8.3f} s {seconds / report['seconds']['bridge']:6.1f} times as long as the bridge")
    print(f"the all-gathers are {report['all_gather_share']:.0%} of gathering")
    return 0


if __name__ == "__main__":
    sys.exit(main())
