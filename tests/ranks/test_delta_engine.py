"""Linear attention in a real engine: one token at a time it says what it says of the whole, and what the trainer says.

vLLM computes linear attention in bf16 alone on a CPU, so rounding is the measure. It is taken from transformers, in
bf16 against fp32, on the same tokens.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
import warm
from patience import deadline
from scenarios import Layout
from shares import TrainSample
from sizes import VOCAB_SIZE

from megatron_rl.types import Mesh, Tokens

pytestmark = pytest.mark.deep
SIZES = dict(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=256,
    initializer_range=0.1,
    rms_norm_eps=1e-3,
    eos_token_id=1,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    num_experts=2,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=32,
    mlp_only_layers=[0, 1, 2],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
"""Both experts are always active, so that no choice of experts differs; vLLM wants one layer that has some. Its kernel
knows heads of 64 and 128."""
NUM_PROMPTS, PROMPT, LENGTH = 16, 8, 100


class Said(NamedTuple):
    """Log-probs of the answers' tokens, each [prompts, length]."""

    folder: Path
    ids: np.ndarray
    """[prompts, prompt + length]"""
    decoded: np.ndarray
    prefilled: np.ndarray
    in_fp32: np.ndarray
    in_bf16: np.ndarray

    @property
    def rounding(self) -> float:
        return float(np.abs(self.in_bf16 - self.in_fp32).mean())


def in_process(module: str, name: str, *arguments):
    """The function of a module that only this process imports."""
    return getattr(importlib.import_module(module), name)(*arguments)


@torch.no_grad()
def theirs(folder: Path, ids: np.ndarray, dtype: torch.dtype, change=lambda model: None) -> np.ndarray:
    """Log-probs of the answers' tokens by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    change(model)
    tokens = torch.from_numpy(ids)
    logp_NTV = model(tokens).logits.float().log_softmax(-1)
    return logp_NTV[:, :-1].gather(2, tokens[:, 1:, None])[:, PROMPT - 1 :, 0].numpy()


@pytest.fixture(scope="module", params=[transformers.Qwen3NextConfig, transformers.Qwen3_5MoeTextConfig])
def said(tmp_path_factory, request) -> Said:
    folder = tmp_path_factory.mktemp("linear") / "model"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(request.param(**SIZES), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-3.0, 0.0)  # so that states remember
    model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, VOCAB_SIZE, PROMPT).tolist()) for _ in range(NUM_PROMPTS)]
    call = ("delta_engine", "answers", folder, prompts, LENGTH)
    ((answers, decoded, prefilled),) = warm.together(in_process, [call], deadline(120))
    ids = np.concatenate((np.array(prompts), answers), 1)
    return Said(
        folder, ids, decoded, prefilled, *(theirs(folder, ids, each) for each in (torch.float32, torch.bfloat16))
    )


def test_decoding_says_what_prefill_says(said):
    """Each of the two rounds like any computation in bf16, so they differ by at most sqrt(2) times as much as one
    differs from fp32. A state that decoding carried wrongly would be further off with every token; means
    over 400 tokens differ by some tenths."""
    difference = np.abs(said.decoded - said.prefilled)
    assert 0 < difference.mean() < 2**0.5 * said.rounding
    quarter = LENGTH // 4
    assert difference[:, -quarter:].mean() < 1.5 * difference[:, :quarter].mean()


def test_the_measure_sees_a_state_that_forgets(said):
    """What decoding with a state that is lost after each token would say."""

    def forget(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(5.0)

    lost = theirs(said.folder, said.ids, torch.float32, forget)
    assert np.abs(said.decoded - lost).mean() > 10 * 2**0.5 * said.rounding


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_trainer_says_what_the_engine_says(trainers, said, dtype):
    samples = []
    for number, (ids, decoded) in enumerate(zip(said.ids, said.decoded, strict=True)):
        acted = np.arange(len(ids)) >= PROMPT
        logp = np.zeros(len(ids), np.float32)
        logp[PROMPT:] = decoded
        tokens = Tokens(ids.astype(np.int32), acted, logp, np.zeros(len(ids), np.int32))
        samples.append(TrainSample(str(number), tokens, 1.0, 1 / (NUM_PROMPTS * LENGTH)))
    layout = Layout(Mesh(tensor=2), num_microbatches=4, dtype=dtype)
    given = dict(folder=said.folder, samples=samples, layout=layout, num_updates=2, temperature=1.0)
    (mismatch, _), *_ = trainers.run("train", 2, **given)
    assert 0 < mismatch["mismatch/mean_abs"] < 2**0.5 * said.rounding
