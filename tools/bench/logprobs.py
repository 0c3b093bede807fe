"""Measure peak memory and time of token log-probs in chunks (megatron_rl/algorithms/logprobs.py) and on the plain path.

The plain path is (hidden @ weight.T / temperature).log_softmax(-1).gather(...). Both paths run forward and backward to
hidden and weight, in fp32 on a CPU or bf16 on a GPU. Each runs in its own process, and the two alternate. Times are the
best of all turns. The time of the CPU cores is reported in addition to the wall time, because it is more meaningful
when other processes use the cores too. Peak memory is the largest memory of a process (VmHWM; on a GPU torch's own
count) minus its memory with the inputs just before.

    python tools/bench/logprobs.py --json
    python tools/bench/logprobs.py --device cuda --tokens 32768 --hidden 5120
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.logprobs import VocabularyShard, token_logprobs

TEMPERATURE = 0.7


def plain(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    log_p_TV = (hidden_TH @ weight_VH.T / TEMPERATURE).float().log_softmax(-1)
    return log_p_TV.gather(1, target_T.unsqueeze(1)).squeeze(1)


def chunked(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    shard = VocabularyShard(num_real=len(weight_VH))
    return token_logprobs(hidden_TH, weight_VH, target_T, shard, temperature=TEMPERATURE)[0]


PATHS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"plain": plain, "chunked": chunked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of each process")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    report = compare(parser.parse_args())
    if report.pop("json"):
        print(json.dumps(report))
        return
    print(f"{'path':8} {'peak over inputs':>18} {'time':>10} {'of cores':>10}")
    for name in PATHS:
        peak, *seconds = (report[f"{name}_{what}"] for what in ("peak_bytes", "time_s", "cpu_s"))
        print(f"{name:8} {peak / 2**20:>14,.0f} MiB" + "".join(f"{s:>9.3f} s" for s in seconds))
    print(
        f"the plain path needs {report['memory_ratio']:.2f} times the memory; the chunked path takes "
        f"{report['time_ratio']:.2f} times as long"
    )


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run both paths in turns and return the sizes and the measurements."""
    context = multiprocessing.get_context("spawn")
    workers: dict[str, Connection] = {}
    for name in PATHS:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, name, args)).start()
        theirs.close()
        workers[name] = ours
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in PATHS}
    peaks: dict[str, int] = {}
    logps: dict[str, Tensor] = {}
    for _ in range(args.repeats):
        for name, worker in workers.items():
            worker.send(True)
            seconds, peaks[name], logps[name] = worker.recv()
            turns[name].append(seconds)
    for worker in workers.values():
        worker.send(False)
    times, cores = ({name: min(turn[i] for turn in turns[name]) for name in PATHS} for i in (0, 1))
    return {
        **vars(args),
        **{f"{name}_peak_bytes": peaks[name] for name in PATHS},
        **{f"{name}_time_s": times[name] for name in PATHS},
        **{f"{name}_cpu_s": cores[name] for name in PATHS},
        "memory_ratio": peaks["plain"] / peaks["chunked"],
        "time_ratio": times["chunked"] / times["plain"],
        "cpu_ratio": cores["chunked"] / cores["plain"],
        "largest_difference": float((logps["plain"] - logps["chunked"]).abs().max()),
    }


def serve(parent: Connection, name: str, args: argparse.Namespace) -> None:
    """Run once for every True that arrives, and send back ((wall seconds, CPU seconds), peak bytes so far without the
    inputs, log-probs)."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16

    def inputs(num_tokens: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        hidden_TH, weight_VH = (
            torch.randn(length, args.hidden, device=args.device, dtype=dtype).mul_(args.hidden**-0.25)
            for length in (num_tokens, vocab_size)
        )
        target_T = torch.randint(vocab_size, (num_tokens,), device=args.device)
        return hidden_TH.requires_grad_(), weight_VH.requires_grad_(), target_T

    run(name, *inputs(8, 64))  # a first run, so that the memory of threads and libraries is not counted
    hidden_TH, weight_VH, target_T = inputs(args.tokens, args.vocabulary)
    held = memory(args.device, "VmRSS")
    while parent.recv():
        hidden_TH.grad = weight_VH.grad = None
        synchronize(args.device)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        logp_T = run(name, hidden_TH, weight_VH, target_T)
        synchronize(args.device)
        seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
        parent.send((seconds, memory(args.device, "VmHWM") - held, logp_T.detach().cpu()))


def run(name: str, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    logp_T = PATHS[name](hidden_TH, weight_VH, target_T)
    logp_T.mean().backward()  # type: ignore[no-untyped-call]  # it has no types
    return logp_T


def memory(device: str, field: str) -> int:
    """The bytes that this process holds now (VmRSS) or held at most (VmHWM)."""
    if device == "cuda":
        return {"VmRSS": torch.cuda.memory_allocated, "VmHWM": torch.cuda.max_memory_allocated}[field]()
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux tells both"
    return 1024 * int(found[1])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
