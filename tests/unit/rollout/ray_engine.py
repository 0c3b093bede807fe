"""A program in which a plain vLLM engine of two ranks, under vLLM's Ray executor, receives pushes. It prints one line
of JSON with the executor's class and the ids and log-probs of a greedy answer.

Its arguments are the folders whose weights are pushed one after the other, and the ids of a prompt with commas between
them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

from tiny_trainers import TinyTrainers  # noqa: E402

from megatron_rl.rollout.engine import set_cpu_environment  # noqa: E402
from megatron_rl.types import Mesh  # noqa: E402

if __name__ == "__main__":
    set_cpu_environment()
    import ray
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    *folders, prompt = sys.argv[1:]
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=2**27,
        runtime_env={"env_vars": environment | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},
    )
    trainers = TinyTrainers(Path(folders[0]), Mesh(tensor=2), 2, "float32")
    llm = LLM(
        folders[0],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        dtype="float32",
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        load_format="dummy",
        weight_transfer_config=WeightTransferConfig(backend="megatron_rl"),
    )
    llm.init_weight_transfer_engine({"init_info": trainers.info})
    for version, folder in enumerate(folders):
        trainers.begin_push(Path(folder), version)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version}})
        llm.finish_weight_update()
        trainers.end_push()
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)
    ids = [int(token) for token in prompt.split(",")]
    answer = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0]
    logp = [next(iter(token.values())).logprob for token in answer.logprobs]
    executor = type(llm.llm_engine.model_executor).__name__
    trainers.close()
    print(json.dumps({"executor": executor, "ids": list(answer.token_ids), "logp": logp}))
