"""Episodes that became several rows: a template that drops thoughts, a summary, a sub-agent, a call that was asked
again. In every layout their gradient is the one of transformers in float64, by hand: each answer of the model that had
an effect counts once, with the advantage of its whole episode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from agent_conversations import END, ids_of
from episode_scenarios import EPISODES, REWARDS, Layout, groups, shares_of
from transformers import AutoModelForCausalLM

from megatron_rl.tools.bench.compare_layouts import parse_layout, relative

pytestmark = pytest.mark.deep

NUM_MICROBATCHES = 3
BOUND = 1e-5
"""Of the largest element of a tensor's gradient: fp32 against float64, through two layers."""


@pytest.fixture(scope="module")
def by_hand(chat_model_folder):
    """The groups with the model's own log-probs, so that no ratio is clipped, and the gradient."""
    model = AutoModelForCausalLM.from_pretrained(chat_model_folder, dtype=torch.float64, attn_implementation="eager")
    num_tokens = len(REWARDS) * sum(len(ids_of(said)) + 1 for all_ in EPISODES.values() for said in all_)
    loss, given = torch.zeros((), dtype=torch.float64), []
    for group, rewards in zip(groups(), REWARDS, strict=True):
        # Four episodes, not nine rows, are the group.
        advantages = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
        episode, payload = -1, []
        for sample, tokens in zip(group.rollouts, group.payload, strict=True):
            episode += sample.begins_answer
            ids = torch.from_numpy(tokens.ids.astype(np.int64))
            logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            mask = torch.from_numpy(tokens.action_mask[1:])
            loss = loss - advantages[episode] * logp[mask].sum() / num_tokens
            engine = np.where(tokens.action_mask, np.append(0, logp.detach().numpy()), 0).astype(np.float32)
            payload.append(replace(tokens, logp_rollout=engine))
        given.append(replace(group, payload=payload))
    loss.backward()
    return given, {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def test_each_answer_that_had_an_effect_is_trained_once():
    for group in groups():
        trained, sizes = [], []
        for sample, tokens in zip(group.rollouts, group.payload, strict=True):
            if sample.begins_answer:
                trained.append([])
                sizes.append(0)
            trained[-1] += tokens.ids[tokens.action_mask].tolist()
            sizes[-1] += 1
        assert trained == [[i for said in all_ for i in (*ids_of(said), END)] for all_ in EPISODES.values()]
        assert sizes == [3, 2, 3, 1], "the rows of each episode"


@pytest.mark.parametrize("layout", ["dp1", "tp2", "pp2", "cp2", "dp2", "tp2-cp2"])
def test_every_layout_has_the_gradient_by_hand(trainers, chat_model_folder, by_hand, layout):
    given, expected = by_hand
    parallel = parse_layout(layout)
    shares = shares_of(chat_model_folder, given, parallel, NUM_MICROBATCHES)
    own = Layout(parallel.mesh, num_microbatches=NUM_MICROBATCHES)
    world = parallel.mesh.world_size
    results = trainers.run(
        "episode_scenarios.policy_gradient", world, folder=chat_model_folder, layout=own, shares=shares
    )
    assert all(number >= 2 for number, _ in results), "the rows of an episode are in several micro-batches"
    found = results[0][1]
    assert found.keys() == expected.keys()
    far = {name: relative(found[name], expected[name]) for name in expected}
    assert max(far.values()) < BOUND, max(far.items(), key=lambda item: item[1])
