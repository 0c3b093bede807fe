from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trainers as worlds
from agent_conversations import TOKENIZER
from shares import TrainSample
from sizes import VOCAB_SIZE

from megatron_rl.actor.packing import SHORTEST_SHARED
from megatron_rl.tools.bench.compare_layouts import random_rows, rows_of_lengths
from megatron_rl.types import Tokens


@pytest.fixture(scope="session")
def trainers():
    """`trainers.run` makes a world of real processes do a scenario."""
    return worlds


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return _random_qwen3(tmp_path_factory.mktemp("qwen3"), tied=False)


@pytest.fixture(scope="session")
def tied_model_folder(tmp_path_factory) -> Path:
    return _random_qwen3(tmp_path_factory.mktemp("qwen3_tied"), tied=True)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A model of every family that the actor trains, by the names of test_actor_families.py."""
    from test_actor_families import write_models

    return write_models(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def deep_model_folder(tmp_path_factory) -> Path:
    return _random_qwen3(tmp_path_factory.mktemp("qwen3_deep"), tied=False, num_layers=5)


@pytest.fixture(scope="session")
def chat_model_folder(tmp_path_factory) -> Path:
    """Two layers for the tokens of `agent_conversations.py`, and three rows that no token has."""
    size = TOKENIZER.get_vocab_size() + 3
    return _random_qwen3(tmp_path_factory.mktemp("qwen3_chat"), tied=False, num_layers=2, vocab_size=size)


def _random_qwen3(folder: Path, tied: bool, num_layers: int = 4, vocab_size: int = VOCAB_SIZE) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        vocab_size=vocab_size,
        tie_word_embeddings=tied,
        rope_theta=10000.0,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a norm that is not loaded
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def samples() -> list[TrainSample]:
    """12 samples of 2 to 23 tokens; their action masks have holes, as a forced delimiter leaves."""
    rng = np.random.default_rng(7)
    result = []
    for i in range(12):
        length = int(rng.integers(2, 24))
        mask = rng.random(length) < 0.7
        mask[0] = False
        mask[-1] = True
        logp = np.where(mask, -4.0 + 0.5 * rng.standard_normal(length), 0.0)
        tokens = Tokens(
            ids=rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
            action_mask=mask,
            logp_rollout=logp.astype(np.float32),
            version=np.where(mask, 0, -1).astype(np.int32),
        )
        result.append(TrainSample(f"prompt{i // 4}#{i % 4}", tokens, float(rng.standard_normal()), 0.0, index=i))
    num_tokens = sum(int(sample.tokens.action_mask.sum()) for sample in result)
    return [replace(sample, weight=1 / num_tokens) for sample in result]


@pytest.fixture(scope="session")
def long_samples() -> list[TrainSample]:
    """7 samples of 1 to 64 tokens; windows and original contexts end inside the longer ones."""
    rng = np.random.default_rng(3)
    lengths = [64, 5, 33, 1, 64, 13, 25]
    result, num_actions = [], sum(lengths) - len(lengths)
    for i, length in enumerate(lengths):
        mask = np.arange(length) > 0
        tokens = Tokens(
            ids=rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
            action_mask=mask,
            logp_rollout=np.where(mask, -4.0 + 0.5 * rng.standard_normal(length), 0).astype(np.float32),
            version=np.where(mask, 0, -1).astype(np.int32),
        )
        result.append(TrainSample(f"prompt{i}#0", tokens, float(rng.standard_normal()), 1 / num_actions, index=i))
    return result


@pytest.fixture(scope="session")
def groups() -> list[Tokens]:
    """Two prompts, longer than windows, with three answers each. Rows of local layers hold the prompts once."""
    prompts = [row.ids for row in rows_of_lengths(VOCAB_SIZE, (SHORTEST_SHARED, 23), np.random.default_rng(4))]
    answers = random_rows(VOCAB_SIZE, num_rows=6, longest=12, seed=5)
    return [
        Tokens(
            ids=np.concatenate((prompts[i // 3], answer.ids)),
            action_mask=np.arange(len(prompts[i // 3]) + len(answer.ids)) >= len(prompts[i // 3]),
            logp_rollout=np.zeros(len(prompts[i // 3]) + len(answer.ids), np.float32),
            version=np.zeros(len(prompts[i // 3]) + len(answer.ids), np.int32),
        )
        for i, answer in enumerate(answers)
    ]


@pytest.fixture(scope="session")
def grouped_samples(long_samples, groups) -> list[TrainSample]:
    """4 of `long_samples`, and the answers to two prompts."""
    answers = [TrainSample(f"prompt{4 + i // 3}#{i % 3}", one, 1.0, 0.01, index=4 + i) for i, one in enumerate(groups)]
    return long_samples[:4] + answers


@pytest.fixture(scope="session")
def equal_samples() -> list[TrainSample]:
    """8 samples of 48 tokens: attention pads nothing, and nearly all tokens are actions, as the estimate assumes."""
    rng = np.random.default_rng(5)
    tokens = [
        Tokens(
            ids=rng.integers(0, VOCAB_SIZE, 48).astype(np.int32),
            action_mask=np.arange(48) > 0,
            logp_rollout=np.zeros(48, np.float32),
            version=np.zeros(48, np.int32),
        )
        for _ in range(8)
    ]
    return [TrainSample(f"prompt{i}#0", one, 1.0, 1 / 376, index=i) for i, one in enumerate(tokens)]
