"""The weights that vLLM holds when it loads and quantises a folder itself."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from megatron_rl.rollout.shared_memory import remove_own_names
from megatron_rl.rollout.start import set_cpu_environment


def checksums(
    folder: Path, quantization: str, tensor: int, attention_backend: str | None = None
) -> list[dict[str, str]]:
    """For each rank the digest of every tensor, by its name. The engine core runs in this process, which is killed when
    it has answered."""
    multiprocessing.set_start_method("fork", force=True)  # semaphores then lose their names at once
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    set_cpu_environment()
    from vllm import LLM

    options = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16")
    if attention_backend:
        options["attention_backend"] = attention_backend
    llm = LLM(str(folder), quantization=quantization, tensor_parallel_size=tensor, **options)
    remove_own_names()
    return llm.collective_rpc("compute_weight_checksums")
