"""An engine of two ranks receives weights from pipeline stages, with tied embeddings and a padded vocabulary; then one
of its ranks dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import deadline
from tiny_references import reference_logp
from tiny_trainers import write_model
from transformers import AutoModelForCausalLM

from megatron_rl.types import Mesh, Prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("tied") / "model", 3, num_tokens=68, vocab_size=70, tie_word_embeddings=True
    )


@pytest.fixture(scope="module")
def stage(make_stage, folder):
    return make_stage(folder, Mesh(pipeline=2), parallel={"tensor": 2}, max_prompt_tokens=8, max_response_tokens=12)


def test_log_probs_after_a_push_from_pipeline_stages_to_tensor_ranks(stage, folder):
    stage.trainers.begin_push(folder, 1)
    with pytest.raises(RuntimeError, match="was to receive version 0"):  # the engine reads both ranks' errors
        stage.run(stage.engine.weights.receive(0))
    stage.trainers.end_push()
    stage.rejoin()
    stage.push(folder, 0)
    prompts = [Prompt("a", (5, 69, 6), ""), Prompt("b", (64, 63), "")]
    groups, again = (stage.run(stage.generate(prompts, 8, 0, seed=0)) for _ in range(2))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampled = set()
    for (_, tokens), (_, repeated) in zip(sum(groups, []), sum(again, []), strict=True):
        difference = np.abs(reference_logp(model, tokens.ids, 1.0, num_tokens=68) - tokens.logp_rollout)[
            tokens.action_mask
        ]
        assert difference.max() < 1e-5  # in fp32 two ranks add partial sums in another order
        assert repeated.ids.tolist() == tokens.ids.tolist()
        sampled |= set(tokens.ids[tokens.action_mask].tolist())
    assert max(sampled) < 68, "rows without a token, and padding rows, are never sampled"
    assert max(sampled) > 63, "tokens of the second rank's part of the vocabulary are sampled"


@pytest.mark.deep
def test_a_worker_that_dies_ends_all_that_is_waited_for(stage, folder):
    """The thread itself may wait for the dead worker: the answers end all the same. It is the last test, because it
    ends the engine."""
    version = stage.load(folder)
    asked = [Prompt("row", (5, 6, 7), "")] * 64

    async def both():
        answers = asyncio.create_task(stage.generate(asked, 16, version, seed=0))
        await asyncio.sleep(0)
        await stage.engine.sampler._thread.call(lambda: None)  # the requests have been added
        os.kill(stage.engine.sampler._thread.engine.model_executor.workers[1].proc.pid, signal.SIGKILL)
        return await asyncio.gather(answers, return_exceptions=True)

    [error] = stage.run(asyncio.wait_for(both(), deadline(60)))
    assert isinstance(error, RuntimeError) and "a worker of vLLM has died" in str(error)
    assert not stage.engine.alive
    stage.close()
