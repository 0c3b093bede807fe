"""An engine of two ranks receives weights from pipeline stages, with tied embeddings and a padded vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_references import reference_logp
from tiny_trainers import write_model
from transformers import AutoModelForCausalLM

from megatron_rl.types import Mesh, Prompt


def test_log_probs_after_a_push_from_pipeline_stages_to_tensor_ranks(make_stage, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied") / "model"
    write_model(folder, seed=3, vocab_size=70, tie_word_embeddings=True)
    stage = make_stage(folder, Mesh(pipeline=2), tensor=2, max_prompt_tokens=8, max_response_tokens=12)
    stage.trainers.begin_push(folder, 1)
    with pytest.raises(RuntimeError, match="was to receive version 0"):  # the engine reads both ranks' errors
        stage.run(stage.engine.weights.receive(0))
    stage.trainers.end_push()
    stage.rejoin()
    stage.push(folder, 0)
    prompts = [Prompt("a", (5, 69, 6), ""), Prompt("b", (64, 63), "")]
    groups, again = (stage.run(stage.engine.generate(prompts, 8, 0, seed=0)) for _ in range(2))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampled = set()
    for (_, tokens), (_, repeated) in zip(sum(groups, []), sum(again, []), strict=True):
        difference = np.abs(reference_logp(model, tokens.ids, 1.0) - tokens.logp_rollout)[tokens.action_mask]
        assert difference.max() < 1e-5  # in fp32 two ranks add partial sums in another order
        assert repeated.ids.tolist() == tokens.ids.tolist()
        sampled |= set(tokens.ids[tokens.action_mask].tolist())
    assert max(sampled) < 70, "padding rows of the vocabulary are never sampled"
    assert max(sampled) > 63, "tokens of the second rank's part of the vocabulary are sampled"
