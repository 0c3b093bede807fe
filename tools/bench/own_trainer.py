"""An example: a trainer of one's own gives its weights to a running vLLM engine, without Megatron.

The trainer is a transformers model and an optimizer of PyTorch, in one process. It learns a text by heart, pushes its
weights over the bridge, and the engine continues the prompt with this text; then it learns another one. The example
needs no GPU and no files, and takes less than a minute.

    python tools/bench/own_trainer.py
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.layout import Engines, Recording
from megatron_rl.models import FAMILIES, Shard, read_shape
from megatron_rl.recipes.tiny.model import write_random_qwen3
from megatron_rl.rollout.start import set_cpu_environment
from megatron_rl.types import Mesh, ModelShape

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")
PROMPT = [5, 6, 7]
TEXTS = ([11, 3, 42, 8, 19, 27, 33, 4], [60, 9, 9, 14, 50, 2, 31, 22])
"""What the trainer learns, one after the other."""


def table_of(parameters: Mapping[str, Tensor], shape: ModelShape) -> Recording:
    """What the trainer's only rank holds: each tensor of the Hugging Face format whole, under its own name. A model of
    transformers must be a dense one, because transformers stacks the experts of a mixture."""

    def whole(name: str, tensor: Tensor) -> Shard:
        box = tuple((0, size) for size in tensor.shape)
        return Shard(name, box, name, box)

    return Recording.of([whole(*one) for one in parameters.items()], FAMILIES[shape.family])


def parameters_of(model: nn.Module, shape: ModelShape) -> dict[str, Tensor]:
    tensors = model.state_dict()
    return {name: one for name, one in tensors.items() if not (shape.tied_embeddings and name == "lm_head.weight")}


class Pusher:
    """The trainer's end of the bridge and the engine's, which must be called at the same time."""

    def __init__(self, model: nn.Module, shape: ModelShape, llm: LLM) -> None:
        self._llm, self._pool, self._version = llm, ThreadPoolExecutor(1), 0
        self._store = host_store("127.0.0.1")
        setup = BridgeSetup(
            shape,
            mesh=Mesh(),
            fused_norms=False,
            engines=Engines(1, tensor=1),
            dtype="float32",
            host="127.0.0.1",
            port=self._store.port,
            trainer=(table_of(parameters_of(model, shape), shape),),
        )
        info = {"setup": setup.as_dict(), "engine": 0}
        self._sender = self._beside(
            lambda: BridgeSender(setup, 0, parameters_of(model, shape)),
            lambda: llm.init_weight_transfer_engine({"init_info": info}),
        )

    def push(self) -> None:
        self._version += 1
        version = self._version
        self._llm.start_weight_update()
        self._beside(
            lambda: self._sender.push(version), lambda: self._llm.update_weights({"update_info": {"version": version}})
        )
        self._llm.finish_weight_update(weight_version=str(version))
        self._llm.reset_prefix_cache()  # the KV cache of common prefixes belongs to the old weights

    def _beside(self, trainer: Callable[[], T], engine: Callable[[], object]) -> T:
        """Call the trainer's end in a thread, and the engine's end here; return what the trainer's end returns."""
        result = self._pool.submit(trainer)
        engine()
        return result.result()

    def close(self) -> None:
        self._sender.close()
        self._llm.shutdown_weight_transfer_engine()
        self._pool.shutdown()


def learn(model: nn.Module, text: Sequence[int], num_steps: int = 40) -> None:
    """Teach the model to continue PROMPT with a text."""
    tokens_ST = torch.tensor([[*PROMPT, *text]])
    labels_ST = torch.tensor([[-100] * len(PROMPT) + list(text)])  # transformers leaves -100 out of the loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(tokens_ST, labels=labels_ST).loss.backward()
        optimizer.step()


@torch.no_grad()
def difference(model: nn.Module, tokens: Sequence[int], logprobs: Sequence[float]) -> float:
    """The largest difference between the log-probs of the engine and of the trainer's model for an answer."""
    logp_TV = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    own = logp_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((own - torch.tensor(logprobs)).abs().max())


def answer(llm: LLM) -> tuple[list[int], list[float]]:
    """How the engine continues PROMPT: tokens and their log-probs."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=len(TEXTS[0]), ignore_eos=True, logprobs=0, detokenize=False)
    [request] = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    [output] = request.outputs
    tokens = list(output.token_ids)
    return tokens, [by_token[token].logprob for token, by_token in zip(tokens, output.logprobs, strict=True)]


def start_engine(folder: str) -> LLM:
    if not torch.cuda.is_available():
        set_cpu_environment()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        folder,
        weight_transfer_config=WeightTransferConfig(backend="megatron_rl"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
    )


def play() -> list[dict[str, Any]]:
    """For each text: what the engine answered `before` and `after` the push, and the largest `difference` between its
    log-probs and the trainer's own."""
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_qwen3(Path(folder), 0, vocab_size=64, pad_token_id=0, eos_token_id=1, max_position_embeddings=64)
        from transformers import AutoModelForCausalLM

        llm, shape = start_engine(folder), read_shape(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = answer(llm)
    # On a CPU, joining gives vLLM's layers new memory, which has no weights until the first push: nothing is asked
    # between the two.
    pusher = Pusher(model, shape, llm)
    for text in TEXTS:
        learn(model, text)
        before, difference_before = said[0], difference(model, *said)
        pusher.push()
        said = answer(llm)
        rounds.append(
            {
                "learnt": text,
                "before": before,
                "difference_before": difference_before,
                "after": said[0],
                "difference_after": difference(model, *said),
            }
        )
    pusher.close()
    return rounds


def main() -> int:
    rounds = play()
    gc.collect()  # vLLM removes its shared memory when its objects, which refer to each other, are collected
    for version, one in enumerate(rounds, 1):
        print(f"version {version}: the trainer learnt {one['learnt']}")
        print(f"  the engine answered {one['before']} before the push, and {one['after']} after it")
        print(f"  the log-probs of engine and trainer now differ by at most {one['difference_after']:.0e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
