"""The estimates of times against what others have published: no number here is ours."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from published import BF16, FITS, FP8, LLAMAS, PUSHES, REFUSED, STEPS, Fits, Push, Step, Training

from megatron_rl.config.optimizer import AdamConfig
from megatron_rl.config.policy import MegatronConfig, ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.config.rollout import ExpectedTokens, RolloutConfig
from megatron_rl.layout import Engines, Links, plan_weights, read_shape
from megatron_rl.layout.traffic import traffic
from megatron_rl.planning.estimates import Work, training_seconds
from megatron_rl.planning.generation import Decoding, answer_lengths, generation_seconds
from megatron_rl.planning.rates import H100, Rates
from megatron_rl.planning.step import PushSeconds, StepSeconds
from megatron_rl.planning.trainer import trainer_memory
from megatron_rl.types import Mesh, ModelShape

MODELS = Path(__file__).parents[3] / "configs" / "model"
FP8_RATES = replace(H100, dense=H100.dense_fp8, mixture=H100.mixture_fp8)
PROMPT = 150
"""The tokens of a prompt, which nobody has published."""


@pytest.fixture
def shape_of(tmp_path) -> Callable[[str], ModelShape]:
    def read(model: str) -> ModelShape:
        if model not in LLAMAS:
            return read_shape(MODELS / f"{model}.json")
        path = tmp_path / f"{model}.json"
        path.write_text(json.dumps(LLAMAS[model]))
        return read_shape(path)

    return read


def even_layers(shape: ModelShape, chunks: int) -> tuple[int, ...] | None:
    """None: every chunk has the same number."""
    each, more = divmod(shape.num_layers, chunks)
    return tuple(each + (chunk < more) for chunk in range(chunks)) if more else None


def parallel_of(shape: ModelShape, gpus: int, one: Training | Step | Fits, virtual: int = 1) -> ParallelConfig:
    """The layers are distributed as evenly as they can be."""
    return ParallelConfig(
        tensor=one.tensor,
        pipeline=one.pipeline,
        context=one.context,
        data=gpus // (one.tensor * one.pipeline * one.context),
        virtual=virtual,
        layers=even_layers(shape, one.pipeline * virtual),
        expert=one.expert,
        expert_tensor=1 if one.expert > 1 else None,
    )


def training_ratio(run: Training, shape: ModelShape, rates: Rates = H100) -> float:
    parallel = parallel_of(shape, run.gpus, run, run.virtual)
    micro = max(1, run.batch // parallel.data // run.micro)
    how = {"dtype": "bfloat16", "recompute": "none", "rates": rates}
    work = Work(np.full(run.batch, run.tokens), num_updates=1, num_passes=0)
    return training_seconds(work, shape, parallel, micro, **how) / run.seconds


def step_ratio(run: Step, shape: ModelShape, rates: Rates = H100) -> float:
    parallel, samples = parallel_of(shape, run.trainers, run), np.full(run.samples, run.mean)
    micro = max(1, math.ceil(run.samples / parallel.data * run.mean / run.longest))
    how = {"dtype": "bfloat16", "recompute": run.recompute, "rates": rates}
    training_s = training_seconds(Work(samples, 1, 2), shape, parallel, micro, **how)
    engines = run.engines // run.engine_tensor
    rollout = RolloutConfig(
        num_engines=engines,
        tensor=run.engine_tensor,
        max_prompt_tokens=PROMPT,
        max_response_tokens=run.longest - PROMPT,
    )
    longest = run.longest - PROMPT
    lengths = answer_lengths(ExpectedTokens(mean=run.mean - PROMPT, tail=longest), longest, run.samples // engines)
    generation_s = generation_seconds(
        Decoding.of(rollout, shape, 2, rates), lengths, prompt=PROMPT, prompts=1, at_once=math.inf, batches=run.lag + 1
    )
    on_policy = run.lag == 0
    step = StepSeconds(generation_s, training_s, rates.push_s, not on_policy, on_policy, rates.whole_step)
    return step.total / run.seconds


def push_ratio(push: Push, shape: ModelShape) -> float:
    mesh = Mesh(
        push.tensor,
        push.pipeline,
        push.data,
        context=push.context,
        expert=push.expert,
        expert_tensor=1,
        layers=even_layers(shape, push.pipeline),
    )
    plan = plan_weights(shape, mesh, Engines(push.engines, push.engine_tensor, 1, True), dtype="bfloat16")
    wire_s = traffic(plan, Links(8), 2**26).least_s * push.width / 2
    return PushSeconds.of(wire_s).others / push.seconds


def test_training_in_bf16(shape_of):
    ratios = [training_ratio(run, shape_of(run.model)) for run in BF16]
    assert 0.95 <= np.median(ratios) <= 1.1
    assert np.quantile(ratios, 0.25) >= 0.8 and np.quantile(ratios, 0.75) <= 1.25
    assert min(ratios) >= 0.7 and max(ratios) <= 1.8


def test_training_in_fp8(shape_of):
    ratios = [training_ratio(run, shape_of(run.model), FP8_RATES) for run in FP8]
    assert 0.95 <= np.median(ratios) <= 1.15
    assert np.quantile(ratios, 0.25) >= 0.8 and np.quantile(ratios, 0.75) <= 1.25


def test_whole_steps(shape_of):
    ratios = [step_ratio(run, shape_of(run.model)) for run in STEPS]
    assert 0.8 <= np.median(ratios) <= 1.25
    assert min(ratios) >= 0.3 and max(ratios) <= 1.5


def test_pushes(shape_of):
    for push in PUSHES:
        assert 0.5 <= push_ratio(push, shape_of(push.model)) <= 1.5, push


def test_trainers_that_others_have_run_fit(shape_of):
    """On a card of 80 GB, which reports 85.5; see `cluster.gpu_memory_gb`."""
    too_large = []
    for run in FITS:
        shape = shape_of(run.model)
        selective = {"recompute_granularity": "selective", "recompute_modules": run.recomputed}
        policy = PolicyConfig(
            parallel=parallel_of(shape, run.gpus, run, run.virtual),
            optimizer=AdamConfig(offload=run.offload, gradients=run.gradients),
            megatron=MegatronConfig(transformer=selective if run.recomputed else {}),
        )
        memory = trainer_memory(
            shape,
            ModelConfig(path="none", dtype="bfloat16", recompute=run.recompute, layers="transformer_engine"),
            policy,
            run.tokens,
            on_gpus=True,
        )
        if max(memory.totals) > 80e9:
            too_large.append(run)
    assert too_large == REFUSED and len(FITS) - len(REFUSED) >= 13
