"""Measure attention over context-parallel ranks beside that of one process: forward and backward of one sequence, with
the attention that Megatron's own layers use here. Each rank is a process with one thread, and the ranks talk over gloo.

    python tools/bench_context.py
    python tools/bench_context.py --tokens 8192 16384 32768 --ranks 1 2 --json

`seconds` is the time of the slowest rank. `MiB` is by how much the memory of the fullest rank grows, above what it
holds before: query, key, value and the gradient of the output.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

HEADS, GROUPS, HEAD_DIM = 4, 2, 64


def work(rank: int, size: int, url: str, num_tokens: int, results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from megatron_rl.actor.attention import PackedAttention, PackedSequences, plan_attention
    from megatron_rl.actor.context import ContextRank

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    context = ContextRank(dist.group.WORLD, rank, size) if size > 1 else None
    config = SimpleNamespace(attention_dropout=0.0, window_size=None, window_attn_skip_freq=None)
    attention = PackedAttention(config, 1)
    num_own = num_tokens // size
    heads = (HEADS, GROUPS, GROUPS)
    query, key, value = (torch.randn(num_own, n, HEAD_DIM, requires_grad=True) for n in heads)
    gradient = torch.randn(num_own, HEADS * HEAD_DIM)

    def step(num_tokens: int) -> None:
        plan = plan_attention(torch.tensor([num_tokens]), HEAD_DIM, 1e4, context=context)
        own = slice(num_tokens // size)
        sequences = PackedSequences(qkv_format="thd", full=plan)
        attention(query[own], key[own], value[own], None, packed_seq_params=sequences).backward(gradient[own])

    step(8 * size)  # what is done once
    dist.barrier()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    step(num_tokens)
    seconds = time.perf_counter() - start
    results.put((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))
    dist.destroy_process_group()


def measure(num_tokens: int, size: int) -> dict[str, float]:
    processes = multiprocessing.get_context("spawn")
    results = processes.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = size, f"file://{folder}/store", num_tokens, results
        ranks = [processes.Process(target=work, args=(rank, *arguments)) for rank in range(size)]
        for process in ranks:
            process.start()
        found = [results.get() for _ in ranks]
        for process in ranks:
            process.join()
    return {
        "tokens": num_tokens,
        "ranks": size,
        "seconds": max(seconds for seconds, _ in found),
        "mib": max(mib for _, mib in found),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    rows = [measure(num_tokens, size) for num_tokens in args.tokens for size in args.ranks]
    if args.json:
        print(json.dumps(rows))
        return 0
    print("tokens  ranks  seconds      MiB")
    for row in rows:
        print(f"{row['tokens']:6}  {row['ranks']:5}  {row['seconds']:7.2f}  {row['mib']:7.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
