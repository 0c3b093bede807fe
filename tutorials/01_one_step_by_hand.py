"""GRPO by hand: every part of a training step in one process, with a model of transformers.

    python tutorials/01_one_step_by_hand.py

There is no Ray, no vLLM and no Megatron here, and a laptop needs half a minute. The numbers that matter (advantages,
micro-batches, weights, loss) come from the same functions as in a run on many nodes. What is simple here is the rest: a
run samples with vLLM, packs rows for Megatron's ranks, and pushes the new weights to the engines.

Task: the model has random weights and 24 characters. An answer earns its share of digits, so the model should learn to
write digits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatron_rl.actor.packing import Microbatch, pack
from megatron_rl.algorithms import PolicyObjective
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.loop.shares import plan_step
from megatron_rl.models import read_shape
from megatron_rl.recipes.tiny.task import write_task
from megatron_rl.types import Group, Prompt, Rollout, StepBatch, Tokens, Verdict

PROMPTS, ANSWERS, LONGEST = 4, 8, 16
"""Prompts of a step, answers to each prompt, and the largest number of tokens of an answer."""


# 1. Sampling. The answers to one prompt are a group. What is kept of each sampled token is its id and its log-prob
# under the policy that sampled it. In a run, vLLM does this, and each token also has the version of the weights.
@torch.no_grad()
def sample(model: PreTrainedModel, prompt: Sequence[int], eos: int, version: int) -> list[Tokens]:
    ids = torch.tensor([list(prompt)] * ANSWERS)
    logp = torch.zeros(ids.shape)
    ended = torch.zeros(ANSWERS, dtype=torch.bool)
    lengths = torch.full((ANSWERS,), len(prompt))
    while not ended.all() and ids.shape[1] < len(prompt) + LONGEST:
        logp_BV = model(ids).logits[:, -1].log_softmax(-1)
        token_B1 = logp_BV.exp().multinomial(1)
        ids, logp = torch.cat((ids, token_B1), 1), torch.cat((logp, logp_BV.gather(1, token_B1)), 1)
        lengths += ~ended
        ended |= token_B1[:, 0] == eos
    answers = []
    for row, row_logp, length in zip(ids, logp, lengths.tolist(), strict=True):
        is_action = np.arange(length) >= len(prompt)
        answers.append(
            Tokens(
                ids=row[:length].numpy().astype(np.int32),
                action_mask=is_action,
                logp_rollout=np.where(is_action, row_logp[:length].numpy(), 0).astype(np.float32),
                version=np.where(is_action, version, -1).astype(np.int32),
            )
        )
    return answers


# 2. Rewards. A verdict has a score, or None where it has no reward. In a run, verifiers score answers in processes of
# their own, while others are still being generated.
def verdict(text: str) -> Verdict:
    score = sum(character.isdigit() for character in text) / max(len(text), 1)
    return Verdict(score, parts=(score,))


def group_of(uid: str, prompt: Sequence[int], answers: Sequence[Tokens], tokenizer, eos: int) -> Group:
    rollouts = []
    for tokens in answers:
        response = tokens.ids[len(prompt) :].tolist()
        rollouts.append(
            Rollout(
                length=len(tokens.ids),
                num_prompt_tokens=len(prompt),
                num_actions=int(tokens.action_mask.sum()),
                num_thought_tokens=0,
                finish="stop" if response[-1] == eos else "length",
                verdict=verdict(tokenizer.decode(response, skip_special_tokens=True)),
            )
        )
    return Group(Prompt(uid, tuple(prompt), ""), rollouts, list(answers), version=0)


# 4. The forward pass. A micro-batch is one row of packed sequences. Entry t of a column belongs to the token that
# position t predicts. Megatron computes a whole row at once; transformers takes one sequence after the other.
def logprobs(model: PreTrainedModel, batch: Microbatch) -> torch.Tensor:
    parts, start = [], 0
    for length in batch.lengths_S.tolist():
        here = slice(start, start + length)
        logp_TV = model(batch.ids_T[here][None]).logits[0].log_softmax(-1)
        parts.append(logp_TV.gather(1, batch.target_T[here, None])[:, 0])
        start += length
    return torch.cat(parts)


def step(model: PreTrainedModel, optimizer, config: GrpoRunConfig, groups: list[Group], version: int) -> dict:
    shape = read_shape(config.model.path)
    objective = PolicyObjective(config.algorithm)

    # 3. The plan of the step. Advantages are relative to the group; groups whose answers all earned the same have none
    # and leave the step. The weight of a token is fixed here, before anything is split: with `token-mean` it is one
    # divided by the number of all action tokens, so the loss does not depend on micro-batches or ranks. Samples are
    # distributed over micro-batches so that none has more than `balance.max_tokens_per_microbatch` tokens and all cost
    # about the same (Karmarkar-Karp).
    shares, metrics = plan_step(config, shape, StepBatch.of_groups(groups, version))
    [[share]] = shares.policy  # one epoch, one data-parallel rank
    if not share.minibatches:
        return metrics | {"loss": float("nan")}
    [microbatches] = pack(share)  # one optimizer step
    [denominators] = share.denominators

    # 5. The loss of the step is the plain sum over micro-batches. With one update the old log-probs are those of this
    # very pass, so every ratio is 1, and the gradient is the policy gradient.
    columns = objective.prepare([batch.columns for batch in microbatches], None, denominators, lambda numbers: numbers)
    optimizer.zero_grad()
    loss = 0.0
    for batch, column in zip(microbatches, columns, strict=True):
        part, _ = objective(logprobs(model, batch), None, column, denominators, {})
        part.backward()
        loss += part.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.policy.optimizer.clip_grad)
    optimizer.step()
    return metrics | {"loss": loss, "grad_norm": norm.item(), "microbatches": len(microbatches)}


def main(num_steps: int = 30) -> list[float]:
    """Train, and return the mean reward of each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is so small that threads only wait for each other
    rewards = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        # The configuration of a run. Another estimator or loss is one more key, such as
        # "algorithm": {"adv_estimator": {"kind": "rloo"}, "loss": {"kind": "gspo"}}.
        config = validate(
            GrpoRunConfig,
            {
                "run": {"name": "by_hand", "steps": num_steps},
                "model": {"path": folder / "model", "dtype": "float32"},
                "data": {"train": "rows that this tutorial makes itself"},
                "rollout": {"max_prompt_tokens": 8, "max_response_tokens": LONGEST},
                "balance": {"max_tokens_per_microbatch": 256},
                "algorithm": {"adv_estimator": {"kind": "grpo", "std": "group"}, "correction": None},
            },
        )
        for number in range(num_steps):
            groups = []
            for index in range(PROMPTS):
                prompt = tokenizer.encode(f"{100 + 7 * number}+{200 + 3 * index}=")
                answers = sample(model, prompt, tokenizer.eos_token_id, version=number)
                groups.append(group_of(f"prompt {index}", prompt, answers, tokenizer, tokenizer.eos_token_id))
            metrics = step(model, optimizer, config, groups, version=number)
            rewards.append(metrics["reward/mean"])
            if number % 5 == 0 or number == num_steps - 1:
                print(
                    f"step {number:2}  reward {metrics['reward/mean']:.3f}  loss {metrics['loss']:7.4f}  "
                    f"gradient {metrics['grad_norm']:7.3f}  answers with a signal {metrics['samples/active']:.0f}"
                )
    return rewards


if __name__ == "__main__":
    main()
