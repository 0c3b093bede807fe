"""Compare our training step with a plain one in PyTorch: the same model, tokens, loss and optimizer.

The model is a small Qwen3 with a large vocabulary and random weights, in fp32 on a CPU. The plain step is transformers'
model, the log_softmax of all logits, `gather`, and torch.optim.AdamW. Ours is the trainer's actor. Both get the same
rows of one length, so that neither pads, in one micro-batch; every token but the first of its row is trained on. With
--processes each way has as many data-parallel ranks: the plain one in DistributedDataParallel.

Each way has processes of its own, and the two alternate. Times are the best of all rounds; the time of the CPU cores is
reported in addition to the wall time, because it is more meaningful when other processes use the cores too. The memory
is the fullest rank's: the largest memory of the process during the steps (VmHWM), minus its memory after a first step
on one short row, plus the gradients that are held between steps. So it is what a step needs above the weights and the
optimizer's state: gradients, activations and logits.

The C library gives large memory back to the kernel, so every plain step allocates gigabytes, and the kernel
clears them, which may take more time than the arithmetic. MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=68719476736 in
the environment make it keep its memory, as the allocators of GPUs do.

    python tools/bench/step.py --json
    python tools/bench/step.py --tokens 8192 --processes 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.bridge.join import host_store
from megatron_rl.config.optimizer import AdamConfig
from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.recipes.tiny.model import write_random_qwen3
from megatron_rl.tools.bench.compare_layouts import deal_rows, rows_of_lengths
from megatron_rl.tools.bench.logprobs import memory
from megatron_rl.types import Tokens

OPTIMIZER = AdamConfig(lr=1e-3, eps=1e-4, clip_grad=0.0)
"""With this epsilon the rounding of tiny gradients is not blown up to whole steps, so that both ways stay together."""

Step = Callable[[], tuple[float, float]]
"""Does one training step; returns the loss and the gradient norm."""


def ours(folder: Path, rank: int, processes: int, store: dist.Store) -> Callable[[Sequence[Tokens]], Step]:
    """Our trainer; the result prepares a step on rows."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.actor.weights import load_weights
    from megatron_rl.algorithms import SupervisedObjective

    parallel = ParallelConfig(data=processes)
    spec = ActorSpec(
        shape=read_shape(folder),
        model=ModelConfig(path=folder, dtype="float32"),
        policy=PolicyConfig(parallel=parallel, optimizer=OPTIMIZER),
        objective=SupervisedObjective(),
        temperature=1.0,
        total_steps=1,
        seed=0,
    )
    actor = MegatronActor(spec, rank=rank, world_size=processes, store=store)
    load_weights(actor, folder)

    def prepare(rows: Sequence[Tokens]) -> Step:
        share = deal_rows(folder, parallel, rows, 1)[rank]

        def step() -> tuple[float, float]:
            actor.begin(share, {})
            metrics = actor.update(0, {})
            return metrics["loss"], metrics["grad_norm"]

        return step

    return prepare


def plain(folder: Path, rank: int, processes: int, store: dist.Store) -> Callable[[Sequence[Tokens]], Step]:
    """A plain trainer; the result prepares a step on rows."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if processes > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.0
    )

    def prepare(rows: Sequence[Tokens]) -> Step:
        ids_SL = torch.from_numpy(np.stack([row.ids for row in rows[rank::processes]])).long()
        next_SL1 = ids_SL.roll(-1, 1).unsqueeze(-1)
        num_actions = sum(len(row.ids) - 1 for row in rows)

        def step() -> tuple[float, float]:
            optimizer.zero_grad()
            logits_SLV = model(input_ids=ids_SL, use_cache=False).logits
            logp_SL = logits_SLV.log_softmax(-1).gather(-1, next_SL1).squeeze(-1)
            loss = -logp_SL[:, :-1].sum() / num_actions
            (loss * processes).backward()  # DistributedDataParallel takes the mean of the ranks' gradients
            # In float64, as ours: a sum of this many squares in fp32 is 3e-5 too small.
            norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in model.parameters()]
            norm = torch.stack(norms).norm()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            return float(total), float(norm)

        return step

    return prepare


WAYS = {"plain": plain, "ours": ours}


def serve(parent: Connection, way: str, rank: int, args: argparse.Namespace, folder: Path, port: int) -> None:
    """Do a step for every True that arrives, and send back (loss, gradient norm, wall seconds, CPU seconds, peak bytes
    so far)."""
    torch.set_num_threads(args.threads)
    prepare = WAYS[way](folder, rank, args.processes, dist.TCPStore("127.0.0.1", port, is_master=False))
    vocabulary, random = read_shape(folder).vocab_size, np.random.default_rng(0)
    prepare(rows_of_lengths(vocabulary, [8] * args.processes, random))()
    step = prepare(rows_of_lengths(vocabulary, [args.length] * (args.tokens // args.length), random))
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    # Megatron and DistributedDataParallel hold a buffer of gradients between steps; plain gradients are freed.
    holds_gradients = way == "ours" or args.processes > 1
    held = memory("cpu", "VmRSS") - holds_gradients * gradient_bytes(folder)
    while parent.recv():
        start, start_cpu = time.perf_counter(), time.process_time()
        loss, norm = step()
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        parent.send((loss, norm, seconds, cpu, memory("cpu", "VmHWM") - held))


def gradient_bytes(folder: Path) -> int:
    """The bytes of the model's gradients in fp32."""
    shape = read_shape(folder)
    return 4 * FAMILIES[shape.family].num_parameters(shape)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Do the steps of both ways in turn, and return the sizes and the measurements."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_random_qwen3(folder, 0, vocab_size=args.vocabulary, max_position_embeddings=args.length)
        ranks: dict[str, list[Connection]] = {way: [] for way in WAYS}
        stores = {way: host_store("127.0.0.1") for way in WAYS}
        for way, pipes in ranks.items():
            for rank in range(args.processes):
                mine, theirs = context.Pipe()
                arguments = theirs, way, rank, args, folder, stores[way].port
                context.Process(target=serve, args=arguments, daemon=True).start()
                theirs.close()
                pipes.append(mine)
        steps: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way, pipes in ranks.items():
                for pipe in pipes:
                    pipe.send(True)
                answers = [pipe.recv() for pipe in pipes]
                loss, norm = answers[0][:2]
                steps[way].append((loss, norm, *(max(column) for column in list(zip(*answers, strict=True))[2:])))
        for pipe in (pipe for pipes in ranks.values() for pipe in pipes):
            pipe.send(False)
    times, cores = ({way: min(step[i] for step in steps[way]) for way in WAYS} for i in (2, 3))
    peaks = {way: steps[way][-1][4] for way in WAYS}
    return {
        **vars(args),
        **{f"{way}_losses": [step[0] for step in steps[way]] for way in WAYS},
        **{f"{way}_grad_norms": [step[1] for step in steps[way]] for way in WAYS},
        **{f"{way}_seconds": [step[2] for step in steps[way]] for way in WAYS},
        **{f"{way}_peak_bytes": peaks[way] for way in WAYS},
        **{f"{way}_time_s": times[way] for way in WAYS},
        **{f"{way}_cpu_s": cores[way] for way in WAYS},
        "memory_ratio": peaks["ours"] / peaks["plain"],
        "time_ratio": times["ours"] / times["plain"],
        "cpu_ratio": cores["ours"] / cores["plain"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="the tokens of a step, of all ranks together")
    parser.add_argument("--length", type=int, default=256, help="the tokens of a row")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--processes", type=int, default=1, help="the data-parallel ranks of each way")
    parser.add_argument("--threads", type=int, help="CPU threads of each process (default: all cores, shared equally)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    if args.tokens % (args.length * args.processes):
        parser.error(
            f"--tokens {args.tokens} is not a multiple of --length x --processes = {args.length * args.processes}, "
            "which it must be, so that each rank has as many whole rows"
        )
    if args.threads is None:
        args.threads = max(1, len(os.sched_getaffinity(0)) // args.processes)
    as_json = vars(args).pop("json")
    report = compare(args)
    if as_json:
        print(json.dumps(report))
        return 0
    print(f"{'way':6} {'peak':>12} {'time':>10} {'of cores':>10} {'losses':>10}")
    for way in WAYS:
        peak, *seconds = (report[f"{way}_{what}"] for what in ("peak_bytes", "time_s", "cpu_s"))
        losses = " ".join(f"{loss:.6f}" for loss in report[f"{way}_losses"])
        print(f"{way:6} {peak / 2**20:>8,.0f} MiB" + "".join(f"{s:>8.3f} s" for s in seconds) + f"   {losses}")
    print(
        f"our step needs {report['memory_ratio']:.2f} of the plain step's memory above weights and optimizer state, "
        f"and {report['time_ratio']:.2f} of its time"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
