"""Run as a program: what vLLM holds when it loads a folder with a quantisation itself. Prints JSON on its last line,
one object a rank: {name: digest of the tensor}.

Arguments: folder, quantisation, tensor parallelism.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

from megatron_rl.rollout.engine import set_cpu_environment  # noqa: E402

if __name__ == "__main__":
    set_cpu_environment()
    from vllm import LLM

    options = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16")
    llm = LLM(sys.argv[1], quantization=sys.argv[2], tensor_parallel_size=int(sys.argv[3]), **options)
    print(json.dumps(llm.collective_rpc("compute_weight_checksums")))
