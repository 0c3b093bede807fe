"""Generation and whole steps, against calculations by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from megatron_rl.config.load import validate
from megatron_rl.config.rollout import ExpectedTokens, RolloutConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.planning.engine import sequence_bytes
from megatron_rl.planning.generation import Decoding, answer_lengths, generation_seconds
from megatron_rl.planning.memory import run_memory
from megatron_rl.planning.rates import Rates
from megatron_rl.planning.step import PushSeconds, StepSeconds, expected_tokens, step_seconds

MODELS = Path(__file__).parents[3] / "configs" / "model"
SHAPE = read_shape(MODELS / "Qwen3-32B.json")
BANDWIDTH, OF_MIXTURES = 0.4 * 3.35e12, 0.3 * 3.35e12
WEIGHTS = 2 * FAMILIES["qwen3"].num_parameters(SHAPE)
DECODING = Decoding(step_s=1.0, reading_s=np.zeros(1001), token_s=0.0)
"""Only steps take time."""


def decoding(shape=SHAPE, parallel=None, **rollout) -> Decoding:
    given = {"max_prompt_tokens": 10, "max_response_tokens": 6, "parallel": parallel or {}, **rollout}
    return Decoding.of(RolloutConfig(**given), shape, 2)


def seconds(lengths, at_once=math.inf, batches=1, costs=DECODING) -> float:
    return generation_seconds(costs, lengths, prompt=10, prompts=1, at_once=at_once, batches=batches)


@pytest.mark.parametrize(("tensor", "reduces"), [(1, 0), (4, 128 * 20e-6), (16, 128 * 100e-6)])
def test_a_step_reads_the_weights_and_waits_for_its_all_reduces(tensor, reduces):
    """Two of them in each of 64 layers, in the node or over two."""
    assert decoding(parallel={"tensor": tensor}).step_s == pytest.approx(WEIGHTS / tensor / BANDWIDTH + reduces)


def test_weights_in_fp8_are_read_in_half_of_the_time():
    assert decoding(quantization="fp8").step_s == pytest.approx(decoding().step_s / 2)


def test_a_cache_in_fp8_is_read_in_half_of_the_time():
    costs = [decoding(vllm=options).reading_s for options in ({}, {"kv_cache_dtype": "fp8"})]
    assert costs[1].tolist() == pytest.approx((costs[0] / 2).tolist()) and costs[0][-1] > 0


@pytest.mark.parametrize("model", ["Qwen3-32B", "DeepSeek-V3", "Olmo-3-32B-Think-DPO", "Qwen3-Next-80B-A3B-Instruct"])
@pytest.mark.parametrize("tensor", [1, 16, 64])
def test_a_token_reads_what_its_rank_keeps_of_the_tokens_before_it(model, tensor):
    """With 8 KV heads on 16 or 64 ranks each rank has one whole head; latent attention is whole on each rank. States of
    linear attention are read and written."""
    shape = read_shape(MODELS / f"{model}.json")
    layers = range(shape.num_layers)
    states = sequence_bytes(shape, tensor, 0, 2, layers)
    kept = sum(sequence_bytes(shape, tensor, tokens, 2, layers) + states for tokens in range(10, 13))
    costs = decoding(shape, {"tensor": tensor})
    rate = OF_MIXTURES if shape.mixture else BANDWIDTH
    assert costs.reading_s[13] - costs.reading_s[10] == pytest.approx(kept / rate)
    stages = decoding(shape, {"tensor": tensor, "pipeline": 2})
    assert stages.reading_s[-1] == pytest.approx(costs.reading_s[-1] / 2), "both stages read at the same time"
    assert stages.step_s == costs.step_s


def test_an_answer_begins_when_another_one_ends():
    assert seconds([3, 3, 3, 3]) == 3
    assert seconds([3, 3, 3, 3], at_once=2) == 6
    assert seconds([2, 2, 2, 9]) == 9, "the last steps have one answer"


def test_with_more_batches_nobody_waits_for_the_longest_answer():
    """15 tokens with places for 1.5 x 4 answers; but an answer of 9 takes at least 4.5 of the steps of two batches."""
    assert seconds([2, 2, 2, 9], batches=2) == 4.5
    assert seconds([4, 4, 4, 3], batches=2) == 15 / 6
    assert seconds([4, 4, 4, 3], batches=2, at_once=3) == 15 / 3


def test_answers_read_and_compute():
    """Answers of 2 and 3 tokens behind 10 of the prompt, which is computed once."""
    costs = Decoding(0.0, reading_s=np.arange(1001.0), token_s=0.5)
    assert seconds([2, 3], costs=costs) == (2 + 3) + 0.5 * (2 + 3 + 10)


def test_lengths_have_the_mean_and_the_tail():
    lengths = answer_lengths(ExpectedTokens(mean=1000, tail=4000), 10**6, 20_000)
    assert lengths.mean() == pytest.approx(1000, rel=2e-3)
    assert np.quantile(lengths, 0.99) == pytest.approx(4000, rel=2e-3)
    assert answer_lengths(ExpectedTokens(mean=1000, tail=4000), 3000, 1000).max() == 3000
    for tail in (1000, 14_001):
        with pytest.raises(ValidationError, match="must be above the mean"):
            ExpectedTokens(mean=1000, tail=tail)


@pytest.mark.parametrize(
    ("overlaps", "shared", "total", "trainers_wait", "engines_wait"),
    [(False, False, 415, 300, 100), (True, False, 310, 200, 0), (False, True, 415, 0, 0)],
)
def test_who_waits_in_a_step(overlaps, shared, total, trainers_wait, engines_wait):
    """300 s of generation and 100 s of training, a push of 10 s, and 5 s if they take turns, when nobody waits."""
    step = StepSeconds(300, 100, 10, overlaps, shared, turn=5)
    assert (step.total, step.trainers_wait, step.engines_wait) == (total, trainers_wait, engines_wait)
    assert step.idle_share(30, 10) == (30 * trainers_wait + 10 * engines_wait) / (40 * total)


@pytest.mark.parametrize(
    ("overlaps", "generation", "training"),
    [(True, 470.9, 1.1), (True, 1.1, 470.9), (False, 0.1, 0.2), (False, 3e9, 0.1)],
)
def test_nobody_waits_less_than_no_time(overlaps, generation, training):
    step = StepSeconds(generation, training, 0.1, overlaps, shared=False, turn=0.3)
    assert min(step.trainers_wait, step.engines_wait) >= 0 and "-" not in f"{step.engines_wait:.0f}"


def test_a_push_is_between_the_links_and_what_others_have_measured():
    push = PushSeconds.of(0.85, num_bytes=600e9)
    assert (push.least, push.most) == pytest.approx((1.0, 0.2 + 5.0))
    many = PushSeconds.of(8.5, num_bytes=600e9)
    assert (many.least, many.most) == pytest.approx((10.0, 0.2 + 10.0)), "the links of many engines take longer"


def config(tmp_path, **sections) -> GrpoRunConfig:
    given = {
        "run": {"name": "x", "folder": str(tmp_path), "steps": 1},
        "model": {"path": str(MODELS / "Qwen3-32B.json"), "dtype": "bfloat16", "recompute": "full"},
        "data": {"train": "rows"},
        "policy": {"parallel": {"tensor": 4, "pipeline": 2}},
        "rollout": {
            "num_engines": 2,
            "parallel": {"tensor": 4},
            "prompts_per_step": 16,
            "max_prompt_tokens": 100,
            "max_response_tokens": 4000,
        },
        "balance": {"max_tokens_per_microbatch": 4104},
        "cluster": {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "gpus_per_node": 8},
    }
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section
    return validate(GrpoRunConfig, given)


def estimate(run: GrpoRunConfig, expected=None) -> StepSeconds:
    shape = SHAPE
    return step_seconds(run, shape, run_memory(run, shape).engine, expected)


def test_expected_lengths_are_an_estimate_beside_the_longest(tmp_path):
    run = config(tmp_path)
    longest = estimate(run)
    expected = estimate(run, ExpectedTokens(mean=1000, tail=4000, prompt=50))
    assert expected.training < longest.training * 1100 / 4100 and expected.generation < longest.generation
    assert expected.push == longest.push
    # With active sampling the groups that are replaced are generated, too.
    replaced = config(tmp_path, rollout={"active_sampling": True})
    half = estimate(replaced, ExpectedTokens(mean=1000, tail=4000, prompt=50, useful=0.5))
    assert half.generation == 2 * expected.generation
    known = {"active_sampling": True, "expected_tokens": {"mean": 1000, "tail": 4000, "useful": 0.5}}
    assert estimate(config(tmp_path, rollout=known)).generation == 2 * longest.generation, "also of the longest answers"


def test_lengths_are_learnt_from_the_run_itself(tmp_path):
    run = config(tmp_path)
    assert expected_tokens(run) is None
    run.run_folder.mkdir()
    steps = [
        {"step": 0, "length/response_mean": 300.0, "length/response_max": 900.0, "stream/useless": 16.0},
        {"step": 1, "length/response_mean": 500.0, "length/response_max": 1100.0, "stream/useless": 16.0},
        {"step": 1, "eval/accuracy": 0.5},
    ]
    (run.run_folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert expected_tokens(run) == ExpectedTokens(mean=400, tail=1000, useful=0.5)
    given = {"expected_tokens": {"mean": 7, "tail": 9}}
    assert expected_tokens(config(tmp_path, rollout=given)) == ExpectedTokens(mean=7, tail=9)


def test_measured_rates_replace_the_planners(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text('{"dense": 0.84, "turn_s": 0.5}')
    run = config(tmp_path, cluster={"calibration": str(path)})
    assert Rates.of(run) == replace(Rates(), dense=0.84, turn_s=0.5)
    assert estimate(run).training < 0.7 * estimate(config(tmp_path)).training
    for text, said in [
        ('{"speed": 1}', "has speed, which is no rate"),
        ('{"dense": 0}', "must be above 0"),
        ("{", "cannot be read"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            Rates.of(run)
