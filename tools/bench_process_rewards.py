"""Measure what rewards for passages of thoughts (`rollout.prefix_values`) cost, with the sizes of their recipe.

One engine answers the same prompts in three ways, in turn:

    none      without values
    shadow    with values, which it computes while it generates other answers, as in a run
    after     with the same values, which it computes when all answers have ended, as in the training phase

Then real runs of recipes/grpo.py, in turn, give the time of a step: without values, with those of the engine, and with
those of the trainer (`prefix_values.by`). Their learning rate is next to 0, so that all have the same answers in all
their steps, and train on all of them.

The task and its warm start are those of recipes/process_rewards, and must have been made. With --thoughts N a random
model takes the place of the warm start, with 8 prompts x 8 answers a step, whose thoughts have N / 8 to 15 N / 8 tokens
and passages of N / 4. Seconds of the engine are given twice: those that pass, and those of its process on the CPU, in
which other busy processes change little.

    python tools/bench_process_rewards.py
    python tools/bench_process_rewards.py --thoughts 512
    python tools/bench_process_rewards.py --json --rounds 5 --runs 3 --steps 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import Rules, load_prompts
from megatron_rl.observe.records import read_metrics
from megatron_rl.recipes.defaults import with_defaults
from megatron_rl.recipes.process_rewards.task import VOCABULARY, write_model
from megatron_rl.recipes.tiny.model import write_random_qwen3
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.rollout.program import Completion
from megatron_rl.types import GroupRequest, Prompt, Rollout

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

YAML = "configs/run/process_rewards_tiny_cpu.yaml"
WAYS = ("none", "shadow", "after")
RUNS = {
    "none": ["rollout.prefix_values=null", "algorithm.adv_estimator={kind: grpo}"],
    "shadow": [],
    "trainer": ["rollout.prefix_values.by=trainer"],
}
"""How the runs differ from the configuration."""
STILL = ["policy.optimizer.lr=1e-12", "algorithm.drop_zero_signal=false", "data.eval=null", "checkpoint.every=0"]
"""What makes the steps of a run equal."""
SKIPPED = 2
"""The first steps of a run, which warm up."""


@dataclass(slots=True)
class Scored:
    """What the engine was asked for values."""

    num_requests: int = 0
    num_tokens: int = 0
    """The prompt tokens of these requests."""
    num_cached: int = 0
    """Those of them that were found in the prefix cache."""


class Engine(VllmEngine):
    """An engine whose way may change."""

    def __init__(self, config: GrpoRunConfig) -> None:
        super().__init__(model=config.model, rollout=config.rollout, seed=0, loads_weights=True)
        self._own_valuer, self._way, self._num_calls = self._valuer, "none", 0
        self.scored = {way: Scored() for way in WAYS}

    def _completion(self, output: RequestOutput) -> Completion:
        completion = super()._completion(output)
        if output.prompt_logprobs is not None:  # only requests for values want those of the prompt
            scored = self.scored[self._way]
            scored.num_requests += 1
            scored.num_tokens += len(output.prompt_token_ids)
            scored.num_cached += output.num_cached_tokens or 0
        return completion

    async def step(self, way: str, prompts: Sequence[Prompt], num_samples: int, seed: int) -> list[Rollout]:
        """The answers to all prompts."""
        valuer, self._way = self._own_valuer, way
        assert valuer is not None, "the configuration has rollout.prefix_values"
        self._valuer = valuer if way == "shadow" else None
        batch = self._num_calls, len(prompts)
        requests = [GroupRequest(i, prompt, num_samples, (seed, i)) for i, prompt in enumerate(prompts)]
        calls = [
            self.answer(self._num_calls + i, request, range(num_samples), batch=batch)
            for i, request in enumerate(requests)
        ]
        self._num_calls += len(prompts)
        groups = await asyncio.gather(*calls)
        if way == "after":
            pairs = zip(prompts, [own for own, _ in groups], strict=True)
            asked = [self._carry_out(valuer.rewarded(*one)) for one in pairs]
            groups = await asyncio.gather(*asked)
        return [sample for own, _ in groups for sample, _ in own]


async def measure_engine(config: GrpoRunConfig, rounds: int) -> dict[str, Any]:
    """What the answers of a step take in each way, and what their values need."""
    from transformers import AutoTokenizer

    rollout = config.rollout
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    rows = load_prompts(config.data.train, tokenizer, Rules(rollout.max_prompt_tokens))
    engine = Engine(config)
    await engine.start()
    wall: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    answers: list[Rollout] = []
    for turn in range(rounds + 1):
        prompts = [rows[(turn * rollout.prompts_per_step + i) % len(rows)] for i in range(rollout.prompts_per_step)]
        found = {}
        for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
            start, start_cpu = time.perf_counter(), time.process_time()
            found[way] = await engine.step(way, prompts, rollout.samples_per_prompt, turn)
            if turn:  # the first round warms up
                wall[way].append(time.perf_counter() - start)
                cpu[way].append(time.process_time() - start_cpu)
        assert len({tuple(sample.length for sample in given) for given in found.values()}) == 1, "equal answers"
        answers += found["shadow"]
    engine.close()
    scored = engine.scored["shadow"]
    return {
        **{f"{way}_s": median(wall[way]) for way in WAYS},
        **{f"{way}_cpu_s": median(cpu[way]) for way in WAYS},
        "saved_time": saved(wall),
        "saved_cpu_time": saved(cpu),
        "tokens_per_answer": fmean(sample.length - sample.num_prompt_tokens for sample in answers),
        "passages_per_answer": fmean(len(sample.token_rewards) for sample in answers),
        "requests_per_answer": scored.num_requests / len(answers),
        "cached_share": scored.num_cached / scored.num_tokens,
        "cached_share_after": engine.scored["after"].num_cached / engine.scored["after"].num_tokens,
    }


def saved(seconds: dict[str, list[float]]) -> float:
    """The share of the added time that is saved in the shadow of generation. Ways of one round have the same company on
    the machine, so what is added is that within a round."""
    shadow, after = (
        median(way - none for way, none in zip(seconds[name], seconds["none"], strict=True))
        for name in ("shadow", "after")
    )
    return 1 - shadow / after


def measure_steps(arguments: Sequence[str], runs: int, steps: int) -> dict[str, Any]:
    """The seconds of the steps of real runs, the median of all."""
    seconds: dict[str, list[float]] = {way: [] for way in RUNS}
    generation: dict[str, list[float]] = {way: [] for way in RUNS}
    ways = list(RUNS)
    with tempfile.TemporaryDirectory() as name:
        for number in range(runs):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                run = f"{way}_{number}"
                words = [*arguments, *STILL, f"run.folder={name}", f"run.name={run}", f"run.steps={SKIPPED + steps}"]
                command = [sys.executable, "-m", "megatron_rl", "grpo", *words, *RUNS[way]]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"the run {run} failed:\n{done.stdout}{done.stderr}")
                records = [r for r in read_metrics(Path(name) / run) if "time/update_s" in r][SKIPPED:]
                seconds[way] += [record["time/total_s"] for record in records]
                generation[way] += [record["time/generate_s"] for record in records]
    none, shadow, trainer = (median(seconds[way]) for way in RUNS)
    return {
        **{f"{way}_s": median(seconds[way]) for way in RUNS},
        **{f"{way}_generation_s": median(generation[way]) for way in RUNS},
        "ratio": shadow / none,
        "trainer_ratio": trainer / none,
        "saved_time": 1 - (shadow - none) / (trainer - none),
    }


def long_thoughts(folder: Path, num_tokens: int) -> list[str]:
    """Write a random model that ends hardly any thought by itself, and return the changes of the configuration that use
    it."""
    import torch
    from transformers import AutoModelForCausalLM

    write_model(folder, seed=0)
    longest, passage = 2 * num_tokens - num_tokens // 8, num_tokens // 4
    write_random_qwen3(folder, 0, vocab_size=64, pad_token_id=0, eos_token_id=1, max_position_embeddings=4 * num_tokens)
    model = AutoModelForCausalLM.from_pretrained(folder)
    weight, ending = model.lm_head.weight, [VOCABULARY.index(text) for text in ("<eos>", "</think>")]
    with torch.no_grad():  # logits of 0 where others have a deviation of 3: one token in 5,000
        weight *= 13
        weight[ending] = 0
    model.save_pretrained(folder)
    return [
        f"model.path={folder}",
        f"rollout.thinking={{thought_tokens: {{kind: uniform, low: {num_tokens // 8}, high: {longest}}}, "
        "response_tokens: 8}",
        f"rollout.max_response_tokens={longest + 16}",
        "rollout.prompts_per_step=8",
        f"rollout.prefix_values={{force: </think>, markers: [], min_tokens: 1, max_tokens: {passage}, "
        "forced_tokens: 8}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", help="changes of the configuration, such as model.path=FOLDER")
    parser.add_argument("--rounds", type=int, default=5, help="the number of rounds of the engine that are measured")
    parser.add_argument("--runs", type=int, default=2, help="the number of runs of each kind; 0: none")
    parser.add_argument(
        "--thoughts", type=int, metavar="N", help="a random model with thoughts of N tokens, in the mean"
    )
    parser.add_argument("--steps", type=int, default=6, help="the number of steps of a run that are measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        words = [YAML, *(long_thoughts(Path(folder), args.thoughts) if args.thoughts else []), *args.changes]
        engine = asyncio.run(measure_engine(with_defaults(load_config(GrpoRunConfig, words)), args.rounds))
        steps = measure_steps(words, args.runs, args.steps) if args.runs else None
    if args.json:
        print(json.dumps({"engine": engine, "steps": steps}))
        return 0
    print("the answers of a step      none    shadow     after   added time saved in the shadow")
    for name, suffix in (("seconds", "_s"), ("seconds of the CPU", "_cpu_s")):
        cells = "".join(f"{engine[f'{way}{suffix}']:8.2f} s" for way in WAYS)
        print(f"  {name:20} {cells}   {engine['saved_time' if suffix == '_s' else 'saved_cpu_time']:.0%}")
    print(f"an answer has {engine['tokens_per_answer']:.1f} tokens and {engine['passages_per_answer']:.1f} passages")
    print(f"its values are {engine['requests_per_answer']:.1f} requests; of their tokens the prefix cache had ", end="")
    print(f"{engine['cached_share']:.0%} (after: {engine['cached_share_after']:.0%})")
    if steps is not None:
        print(
            f"a step of training takes {steps['none_s']:.2f} s without values, {steps['shadow_s']:.2f} s with those of "
            f"the engine, {steps['ratio']:.2f} times as long, and {steps['trainer_s']:.2f} s with those of the "
            f"trainer, {steps['trainer_ratio']:.2f} times as long"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
