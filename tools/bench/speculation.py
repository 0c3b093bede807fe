"""Measure what drafts give and cost (`rollout.speculative`): two engines of vLLM, with and without, asked in turn.

    repetitive    answers at a temperature of 0.01, at which a model soon repeats itself
    new           answers at a temperature of 2, where hardly any token can be drafted

All answers have the same length. Both engines must give the same tokens. The ratio of the CPU seconds of the engine's
thread is less noisy than the ratio of tokens/s, if the machine does other things, too.

    python tools/bench/speculation.py
    python tools/bench/speculation.py --model models/SmolLM2-135M-Instruct --answers 1 4 16 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout.backend import EngineSpec
from megatron_rl.rollout.program import Call, Completion, Request
from megatron_rl.rollout.vllm_sampler import VllmSampler

TEMPERATURES = {"repetitive": 0.01, "new": 2.0}
PROMPT = 8
"""The number of tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class SpeculationTurn:
    """What an engine is asked for."""

    temperature: float
    num_answers: int
    num_tokens: int


class FixedLengths(VllmSampler):
    """A sampler whose answers end at their largest length, at the temperature of a turn."""

    temperature = 1.0

    def _params(self, greedy: bool) -> dict[str, Any]:
        given = {"temperature": self.temperature, "ignore_eos": True, "stop_token_ids": []}
        return super()._params(greedy) | given


async def answer(sampler: FixedLengths, turn: SpeculationTurn) -> dict[str, Any]:
    """The answers to one prompt, which are a group."""
    sampler.temperature = turn.temperature
    prompt = tuple(range(5, 5 + PROMPT))
    requests = [Request(prompt, Call(turn.num_tokens), seed, answer=(1, seed)) for seed in range(turn.num_answers)]
    cpu, start = await sampler.call(time.thread_time), time.perf_counter()
    found: list[Completion] = await asyncio.gather(
        *(asyncio.wrap_future(one) for one in await sampler.call(lambda: sampler.ask(requests)))
    )
    seconds, cpu = time.perf_counter() - start, await sampler.call(time.thread_time) - cpu
    drafts, counts = sampler.drafts, {}
    if drafts is not None:
        drafts.forget(1)
        counts = await sampler.call(drafts.take_counts)
    tokens, logp = [list(one.ids) for one in found], [list(one.logp) for one in found]
    return {"seconds": seconds, "cpu": cpu, "tokens": tokens, "logp": logp, "counts": counts}


def serve(pipe: Connection, folder: Path, tokens: int, longest: int) -> None:
    """An engine that answers turns until its pipe ends."""
    logging.disable(logging.WARNING)
    rollout = RolloutConfig(
        max_prompt_tokens=PROMPT,
        max_response_tokens=longest,
        delimiter="",
        speculative={"tokens": tokens} if tokens else None,
    )
    spec = EngineSpec(ModelConfig(path=folder, dtype="float32"), rollout, seed=0, loads_weights=True)

    async def work() -> None:
        sampler = FixedLengths(spec)
        await sampler.start()
        pipe.send("ready")
        while (turn := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await answer(sampler, turn))
        sampler.close()

    asyncio.run(work())


def write_model(folder: Path) -> Path:
    """A model of 25M parameters with random weights. Its embeddings are large, so that the next token follows from the
    last one, and likely tokens run in circles."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **sizes, num_key_value_heads=4, vocab_size=2048, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config).float()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1 if "embed" in name else 0.02)
    model.save_pretrained(folder)
    return folder


def measure(folder: Path, answers: Sequence[int], tokens: int, drafts: int, turns: int) -> list[dict[str, Any]]:
    """A row for each kind of answers and each number of answers at the same time."""
    context = multiprocessing.get_context("spawn")
    engines = []
    for most in (0, drafts):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, folder, most, tokens), daemon=True)
        process.start()
        assert ours.recv() == "ready"
        engines.append((process, ours))
    rows = []
    for kind, temperature in TEMPERATURES.items():
        for number in answers:
            results: list[list[dict[str, Any]]] = [[], []]
            for turn in range(turns + 1):  # the first one warms up
                for engine in (0, 1) if turn % 2 else (1, 0):
                    engines[engine][1].send(SpeculationTurn(temperature, number, tokens))
                    results[engine].append(engines[engine][1].recv())
            rows.append({"kind": kind, "answers": number, **compared(*results)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for process, pipe in engines:
        pipe.send(None)
        process.join(30)
    return rows


def compared(without: Sequence[dict[str, Any]], with_drafts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians over the turns, and whether both give the same."""
    number = sum(map(len, without[0]["tokens"]))
    pairs = list(zip(without[1:], with_drafts[1:], strict=True))
    flat = [[x for one in results[0]["logp"] for x in one] for results in (without, with_drafts)]
    counts = with_drafts[0]["counts"]
    return {
        "tokens_per_s": [number / median(one["seconds"] for one in results[1:]) for results in (without, with_drafts)],
        "times": median(a["seconds"] / b["seconds"] for a, b in pairs),
        "times_cpu": median(a["cpu"] / b["cpu"] for a, b in pairs),
        "drafted": counts.get("drafted", 0) / number,
        "accepted": counts.get("accepted", 0) / number,
        "same_tokens": without[0]["tokens"] == with_drafts[0]["tokens"],
        "logp_difference": max(abs(a - b) for a, b in zip(*flat, strict=True)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; without it a random model of 25M parameters is written")
    parser.add_argument("--answers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="answers at the same time")
    parser.add_argument("--tokens", type=int, default=256, help="the length of an answer")
    parser.add_argument("--drafts", type=int, default=8, help="rollout.speculative.tokens")
    parser.add_argument("--turns", type=int, default=3, help="how often each engine is measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_model(Path(folder) / "model")
        rows = measure(model, args.answers, args.tokens, args.drafts, args.turns)
    if args.json:
        print(json.dumps(rows))
        return 0
    print("kind        answers  tokens/s without, with   times  times (CPU)  drafted  accepted  same tokens")
    for row in rows:
        without, with_drafts = row["tokens_per_s"]
        print(
            f"{row['kind']:10}  {row['answers']:7}  {without:16,.0f}  {with_drafts:6,.0f}  {row['times']:6.2f}"
            f"  {row['times_cpu']:11.2f}  {row['drafted']:7.1%}  {row['accepted']:8.1%}  {row['same_tokens']}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
