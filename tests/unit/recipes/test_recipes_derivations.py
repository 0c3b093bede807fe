"""With a trained model the value of a thought's beginnings rises along right derivations, and not along others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import sqrt

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.recipes.process_rewards.task import VOCABULARY, derivation, question
from megatron_rl.recipes.tiny.model import write_character_model
from megatron_rl.rollout.coroutine import Coroutine, begin
from megatron_rl.rollout.programs.prefix_values import PrefixValuer
from megatron_rl.types import Prompt

DIGITS, STEPS, BATCH, LR = 2, 300, 32, 6e-3
DERIVATIONS = 200
Z = 3.29
"""The quantile of the normal distribution for 99.95 %."""


class Trained:
    """A model that has learnt to add numbers of two digits, from demonstrations without errors that end after any
    column."""

    def __init__(self, folder) -> None:
        self.folder, self.rng = folder, random.Random(0)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
        self.model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, tie_word_embeddings=False, **sizes, **heads))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self.train()
        finally:
            torch.set_num_threads(threads)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def pair(self) -> tuple[int, int]:
        return self.rng.randint(10 ** (DIGITS - 1), 10**DIGITS - 1), self.rng.randint(0, 10**DIGITS - 1)

    def train(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS, pct_start=0.1)
        for _ in range(STEPS):
            rows, starts = [], []
            for _ in range(BATCH):
                a, b = self.pair()
                columns, answer = derivation(a, b, self.rng.randint(0, DIGITS))
                asked = self.ids(question(a, b))
                rows.append(asked + self.ids(f"{''.join(columns)}</think>{answer}"))
                starts.append(len(asked))
            ids_SL, is_row_SL = padded(rows)
            learnt_SL = is_row_SL & (torch.arange(ids_SL.shape[1]) >= torch.tensor(starts)[:, None])
            targets_SL = ids_SL.masked_fill(~learnt_SL, -100)[:, 1:]
            logits_SLV = self.model(input_ids=ids_SL).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits_SLV.flatten(0, 1), targets_SL.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()

    def score(self, texts: Sequence[tuple[tuple[int, ...], int]]) -> Coroutine[list[list[float]]]:
        yield from ()  # it waits for nothing
        return self.log_probs(texts)

    @torch.no_grad()
    def log_probs(self, texts: Sequence[tuple[tuple[int, ...], int]]) -> list[list[float]]:
        ids_SL, _ = padded([row for row, _ in texts])
        logp_SLV = self.model(input_ids=ids_SL).logits[:, :-1].log_softmax(-1)
        logp_SL = logp_SLV.gather(-1, ids_SL[:, 1:, None])[..., 0]
        return [logp_SL[s, len(row) - 1 - num : len(row) - 1].tolist() for s, (row, num) in enumerate(texts)]

    def rise(self, a: int, b: int, columns: Sequence[str]) -> float:
        """By how much a whole thought makes the right answer more probable, in nats a token."""
        cfg = PrefixValues(force="</think>", markers=("#",), min_tokens=4, max_tokens=16)
        valuer = PrefixValuer(self.folder, cfg, self.ids("</think>"), self.score, no_rollouts)
        asked = tuple(self.ids(question(a, b)))
        wanted = valuer.wanted(Prompt("row", asked, "", {"ground_truth": a + b}))
        beginnings = [[*asked], [*asked, *self.ids("".join(columns))]]
        before, after = begin(valuer.values(beginnings, wanted)).result()
        return after - before


def no_rollouts(prompt, beginnings):
    raise AssertionError("the values are log-probs")


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows with padding at their ends, and which tokens are none, [S, L]."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return ids, torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("model")
    write_character_model(folder, 0, VOCABULARY, ["<think>", "</think>"], num_positions=128)
    return Trained(folder)


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The interval that has the mean with a confidence of 99.9 %, by the central limit theorem."""
    x = torch.tensor(values, dtype=torch.float64)
    margin = Z * float(x.std()) / sqrt(len(x))
    return float(x.mean()) - margin, float(x.mean()) + margin


@pytest.mark.deep
def test_values_rise_along_right_derivations_and_not_along_shuffled_ones(trained):
    """The same sums, and the same columns in another order: a model that reads them copies digits to wrong places."""
    right, shuffled = [], []
    while len(right) < DERIVATIONS:
        a, b = trained.pair()
        columns, _ = derivation(a, b, DIGITS)
        if columns != columns[::-1]:
            right.append(trained.rise(a, b, columns))
            shuffled.append(trained.rise(a, b, columns[::-1]))
    assert bounds(right)[0] > 0
    assert bounds(shuffled)[1] < 0
    assert bounds([one - other for one, other in zip(right, shuffled, strict=True)])[0] > 0


@pytest.mark.deep
def test_a_wrong_column_is_worth_less_than_the_right_one(trained):
    """They differ in one digit, the first column's last one."""
    right, wrong = [], []
    for _ in range(DERIVATIONS):
        a, b = trained.pair()
        [column], _ = derivation(a, b, 1)
        other = (int(column[-2]) + trained.rng.randint(1, 9)) % 10
        right.append(trained.rise(a, b, [column]))
        wrong.append(trained.rise(a, b, [f"{column[:-2]}{other} "]))
    assert bounds(right)[0] > 0
    assert bounds([one - other for one, other in zip(right, wrong, strict=True)])[0] > 0
