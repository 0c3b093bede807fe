"""Measure what a thinking budget costs: a real vLLM engine with a tiny model answers the same prompts without a budget,
with two calls, and with vLLM's own budget.

The model rarely ends a thought by itself, so almost every thought has its whole budget, and answers have equally many
tokens in all modes. What the second call costs is then the difference: its prompt is in the prefix cache but for its
last block, which is computed anew.

Scheduler and model run in one thread of this process, and seconds are those of its CPU time, so that other busy
processes change little.

    python tools/bench_budget.py
    python tools/bench_budget.py --json --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.recipes.tiny.model import write_random_qwen3
from megatron_rl.rollout.budgets import Budgets
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.rollout.program import Completion
from megatron_rl.types import GroupRequest, Prompt

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

PROMPT, THOUGHT, ANSWER = 64, 256, 127
"""The numbers of tokens. A prompt ends with the token that opens the thought."""
PROMPTS, SAMPLES = 4, 8
VOCABULARY, EOS, OPENING = 512, 0, 1
MODES = ("none", "two_call", "native")


class Engine(VllmEngine):
    """An engine whose answers end with their budgets alone, and whose mode may change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_computed = 0
        """The number of prompt tokens that were computed, and not found in the prefix cache."""
        super().__init__(
            model=ModelConfig(path=folder, dtype="float32"), rollout=config("native"), seed=0, loads_weights=True
        )

    def use(self, mode: str) -> None:
        self._budgets = Budgets(self._folder, config(mode), on_gpu=False)

    def _completion(self, output: RequestOutput) -> Completion:
        self.num_computed += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
        return super()._completion(output)

    def _params(self, greedy: bool) -> dict[str, Any]:
        # A trained model hardly opens a thought within a thought. A random one does so in two answers of five, and each
        # time vLLM's own budget needs another call.
        return super()._params(greedy) | {"ignore_eos": True, "stop_token_ids": [], "logit_bias": {OPENING: -100.0}}


def config(mode: str) -> RolloutConfig:
    thinking = {"mode": mode, "thought_tokens": THOUGHT, "response_tokens": ANSWER}
    return RolloutConfig.model_validate(
        {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_prompt_tokens": PROMPT,
            "max_response_tokens": THOUGHT + 1 + ANSWER,
            "thinking": None if mode == "none" else thinking,
        }
    )


def write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    positions = PROMPT + THOUGHT + 1 + ANSWER
    write_random_qwen3(folder, 0, vocab_size=VOCABULARY, eos_token_id=EOS, max_position_embeddings=positions)
    words = ["<eos>", "<think>", "</think>", "<unk>", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = ["<think>", "</think>"]
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", unk_token="<unk>", additional_special_tokens=special
    ).save_pretrained(folder)


def prompts(number: int) -> list[Prompt]:
    """The prompts of a round; no two are equal, so that none is in the cache."""
    rows = [number * PROMPTS + i for i in range(PROMPTS)]
    return [Prompt(str(row), (4 + row % 256, 4 + row // 256, *[9] * (PROMPT - 3), OPENING), "") for row in rows]


async def answer(engine: Engine, number: int) -> list[Any]:
    """The answers of a round, which begin together."""
    requests = [GroupRequest(i, prompt, SAMPLES, (number, i)) for i, prompt in enumerate(prompts(number))]
    batch = number, len(requests)
    calls = [
        engine.answer(number * PROMPTS + i, request, range(SAMPLES), batch=batch) for i, request in enumerate(requests)
    ]
    return [one for own, _ in await asyncio.gather(*calls) for one in own]


async def measure(rounds: int) -> dict[str, float]:
    """The numbers of each mode: the median tokens/s in rounds that alternate, the same as a share of the rate without a
    budget, and the number of prompt tokens that were computed for an answer, those of the second call included."""
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        engine = Engine(Path(name))
        await engine.start()
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        computed: dict[str, float] = {}
        for turn in range(rounds + 1):
            for i, mode in enumerate(MODES):
                engine.use(mode)
                engine.num_computed = 0
                start = time.process_time()
                answers = await answer(engine, turn * len(MODES) + i)
                seconds = time.process_time() - start
                computed[mode] = engine.num_computed / len(answers)
                if turn:  # the first one warms up
                    num_tokens = sum(sample.length - sample.num_prompt_tokens for sample, _ in answers)
                    rates[mode].append(num_tokens / seconds)
        engine.close()
    # Rounds next to each other have the same company on the machine, so the ratio is that within a round.
    shares = {mode: median(a / b for a, b in zip(rates[mode], rates["none"], strict=True)) for mode in MODES[1:]}
    return {
        **{f"{mode}_tokens_per_s": median(rates[mode]) for mode in MODES},
        **{f"{mode}_prefill_tokens": computed[mode] for mode in MODES},
        **{f"{mode}_share": share for mode, share in shares.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="the number of rounds that are measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = asyncio.run(measure(args.rounds))
    if args.json:
        print(json.dumps(results))
        return 0
    print(f"tokens/s without a budget: {results['none_tokens_per_s']:,.0f}")
    for mode in MODES[1:]:
        rate, share = results[f"{mode}_tokens_per_s"], results[f"{mode}_share"]
        computed = results[f"{mode}_prefill_tokens"]
        print(f"{mode:10} {rate:,.0f} ({share:.2f} times); {computed:.0f} prompt tokens computed for an answer")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
