"""The part "same answers" of `megatron-rl gpu-day --loop`: tokens with and without CUDA graphs, before and after a
push.

The engine is the run's own, and the trainer is a process that holds the model's weights under their Hugging Face names
(as in own_trainer.py), so that Megatron is not needed. The trainer pushes the weights of the folder, and then the same
weights with noise. Graphs are captured before the first push: one that reads an older copy of a weight shows in both
answers.

On a CPU both ways are the same program, and every token must be equal. On a GPU they are not: with graphs vLLM pads a
batch to a captured size, so that products take other kernels and round otherwise, and a model with two nearly equal
log-probs then chooses another token, after which its answer goes another way. So differing tokens are counted there,
and only two things are faults: graphs that vLLM has switched off, and a push that changes no answer.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.layout import Engines
from megatron_rl.models import read_shape
from megatron_rl.rollout.program import Samples
from megatron_rl.tools.bench.gpu_day.sizes import Found, Number, all_at_once
from megatron_rl.tools.bench.own_trainer import table_of
from megatron_rl.types import GroupRequest, Mesh, Prompt

EAGER: dict[str, Any] = {"enforce_eager": True}
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    # Without compilation, which takes a minute at a first start.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
"""vLLM's arguments for CUDA graphs (`rollout.vllm`)."""
NUM_PROMPTS = 8
NOISE = 0.2
"""The noise of the second push, as a share of each tensor's standard deviation."""
PUSH_TIMEOUT_S = 60.0

Answers = list[list[int]]
"""The sampled tokens of the answer to each prompt."""


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """What one engine has answered."""

    graphs: str
    """vLLM's mode of CUDA graphs; NONE: it has none."""
    before: Answers
    after: Answers


def same_answers(config: GrpoRunConfig, prompts: Sequence[Prompt], device: str) -> Found:
    """
    Args:
        config: the run, whose model, lengths and sampling the engines have.
        prompts: each is answered once, at temperature 0.
    """
    ways = {"eager": EAGER, "graphs": GRAPHS if device == "cuda" else EAGER}
    found: dict[str, EngineAnswers] = {}
    for way, options in ways.items():
        rollout = config.rollout.model_copy(update={"vllm": {**config.rollout.vllm, **options}})
        changed = config.model_copy(update={"rollout": rollout})
        try:  # a process for each engine, because vLLM gives a GPU's memory back when its process ends
            [found[way]] = all_at_once([(_answer, (changed, prompts, device))])
        except (RuntimeError, ValueError, OSError) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[-1]
            return Found(numbers_of(found), [f"The engine ({way}) ended with: {said}"])
    return Found(numbers_of(found), problems_of(found, device))


def numbers_of(found: Mapping[str, EngineAnswers]) -> dict[str, Number]:
    numbers: dict[str, Number] = {}
    for way, one in found.items():
        numbers |= {
            f"{way}: vLLM's mode of CUDA graphs": one.graphs,
            f"{way}: tokens": sum(map(len, one.before + one.after)),
            f"{way}: tokens that the push has changed": differing(one.before, one.after),
        }
    if len(found) == 2:
        eager, graphs = found.values()
        for when, first, second in (
            ("before", eager.before, graphs.before),
            ("after", eager.after, graphs.after),
        ):
            numbers[f"tokens that differ with graphs, {when} the push"] = differing(first, second)
            others = [one != other for one, other in zip(first, second, strict=True)]
            numbers[f"answers that differ with graphs, {when} the push, of {len(others)}"] = sum(others)
    return numbers


def problems_of(found: Mapping[str, EngineAnswers], device: str) -> list[str]:
    """See the module."""
    problems = [
        f"The push has changed no answer of the engine ({way}): it still answers with the weights of before."
        for way, one in found.items()
        if one.before == one.after
    ]
    eager, graphs = found["eager"], found["graphs"]
    if device == "cuda" and graphs.graphs == "NONE":
        problems.append("vLLM has switched CUDA graphs off, so that nothing was compared; its log says why.")
    if device == "cpu":
        problems += [
            f"{number} tokens differ {when} the push between two engines that run the same program."
            for when, number in (
                ("before", differing(eager.before, graphs.before)),
                ("after", differing(eager.after, graphs.after)),
            )
            if number
        ]
    return problems


def differing(first: Answers, second: Answers) -> int:
    """The places at which two sets of answers have different tokens, or only one has a token."""
    return sum(
        sum(x != y for x, y in zip(one, other, strict=False)) + abs(len(one) - len(other))
        for one, other in zip(first, second, strict=True)
    )


def _answer(config: GrpoRunConfig, prompts: Sequence[Prompt], device: str) -> EngineAnswers:
    """Start an engine in this process and a trainer in another one, push twice, and answer after each push."""
    return asyncio.run(_answered(config, prompts, device))


async def _answered(config: GrpoRunConfig, prompts: Sequence[Prompt], device: str) -> EngineAnswers:
    from megatron_rl.bridge.join import host_store
    from megatron_rl.rollout.backend import EngineSpec
    from megatron_rl.rollout.engine import Engine
    from megatron_rl.rollout.vllm_sampler import VllmSampler

    sampler = VllmSampler(EngineSpec(config.model, config.rollout, config.run.seed))
    engine = Engine(sampler.spec, lambda _: sampler)
    await engine.start()
    store = host_store("127.0.0.1")
    setup = BridgeSetup(
        shape := read_shape(config.model.path),
        Mesh(),
        fused_norms=False,
        engines=Engines(),
        dtype=config.model.dtype,
        host="127.0.0.1",
        port=store.port,
        timeout_s=PUSH_TIMEOUT_S,
        trainer=(table_of(_weights(config.model.path, "cpu", torch.float32), shape),),
    )
    trainer = multiprocessing.get_context("spawn").Process(
        target=_push_twice, args=(setup, config.model.path, device, config.model.dtype)
    )
    trainer.start()
    try:
        await engine.weights.init_transfer({"setup": setup.as_dict(), "engine": 0})
        answers: list[Answers] = []
        for version in range(2):
            await sampler.weights.receive(version)
            # All together, as the calls of a run.
            batch = (version, len(prompts))
            calls = [
                engine.answer(number, GroupRequest(number, prompt, 1, (0, number), True), range(1), version, batch)
                for number, prompt in enumerate(prompts)
            ]
            answers.append([_sampled(samples) for samples, _ in await asyncio.gather(*calls)])
        graphs = sampler._thread.engine.vllm_config.compilation_config.cudagraph_mode.name
    finally:
        trainer.kill()
        trainer.join()
        engine.close()
    return EngineAnswers(graphs, *answers)


def _sampled(samples: Samples) -> list[int]:
    [(_, tokens)] = samples
    ids: list[int] = tokens.ids[tokens.action_mask].tolist()
    return ids


def _weights(folder: Path, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of the folder's files, without an output layer that is the embedding."""
    from safetensors.torch import load_file

    shape = read_shape(folder)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    kept = {name: one for name, one in tensors.items() if not (shape.tied_embeddings and name == "lm_head.weight")}
    return {name: tensor.to(device, dtype) for name, tensor in kept.items()}


def _push_twice(setup: BridgeSetup, folder: Path, device: str, dtype: str) -> None:
    """The trainer's process: push the weights as version 0, and with noise as version 1."""
    from megatron_rl.bridge.sender import BridgeSender

    weights = _weights(folder, "cuda:0" if device == "cuda" else device, getattr(torch, dtype))
    sender = BridgeSender(setup, 0, weights)
    sender.push(0)
    random = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        noise = torch.randn(tensor.shape, generator=random).to(tensor)
        tensor += NOISE * tensor.float().std().to(tensor) * noise if tensor.ndim > 1 else 0
    sender.push(1)
    sender.close()
