"""An engine of vLLM that answers and then reads its own answers."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from tqdm import tqdm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from megatron_rl.rollout.start import remove_leftovers, remove_own_names, set_cpu_environment


def answers(folder: Path, prompts: list[tuple[int, ...]], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens of the answers, their log-probs at decoding, their log-probs when prompt and answer are one prompt), each
    [prompts, length], in bfloat16."""
    set_cpu_environment()
    tqdm.set_lock(threading.RLock())  # its own is for processes, and its name outlives this one, which is ended
    remove_leftovers()
    config = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=True,
        block_size=32,
        max_model_len=256,
        max_num_batched_tokens=8192,
        max_num_seqs=len(prompts),
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend=UniProcExecutor,
    ).create_engine_config()
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    remove_own_names()
    # vLLM's log-probs of a prompt know no other temperature.
    common = dict(temperature=1.0, detokenize=False, ignore_eos=True)
    given = [SamplingParams(**common, max_tokens=length, logprobs=0, seed=seed) for seed in range(len(prompts))]
    said = finish(engine, prompts, given)
    ids = np.array([one.outputs[0].token_ids for one in said])
    decoded = [[step[token].logprob for step, token in zip(one.outputs[0].logprobs, row, strict=True)]
               for one, row in zip(said, ids.tolist(), strict=True)]  # fmt: skip
    whole = [(*prompt, *row) for prompt, row in zip(prompts, ids.tolist(), strict=True)]
    read = finish(engine, whole, [SamplingParams(**common, max_tokens=1, prompt_logprobs=0)] * len(prompts))
    prefilled = [
        [step[token].logprob for step, token in zip(one.prompt_logprobs[-length:], row[-length:], strict=True)]
        for one, row in zip(read, whole, strict=True)
    ]
    engine.engine_core.shutdown()
    return ids, np.array(decoded), np.array(prefilled)


def finish(engine: LLMEngine, prompts: list[tuple[int, ...]], given: list[SamplingParams]) -> list[RequestOutput]:
    for number, (prompt, parameters) in enumerate(zip(prompts, given, strict=True)):
        engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, parameters)
    done: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        done |= {int(output.request_id): output for output in engine.step() if output.finished}
    return [done[number] for number in range(len(prompts))]
