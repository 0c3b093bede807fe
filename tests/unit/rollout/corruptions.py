"""Damage to what an engine's kernels read, done in its workers after vLLM has processed a push and before it is
verified; and the error of a push that is damaged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_workers import called_in_workers

from megatron_rl.types import Prompt

Damage = Callable[[Any, dict[str, Tensor]], None]
"""What a damage does with a model and a copy of the tensors that it held before the push."""
PROMPT = Prompt("row", (5, 6, 7), "")


def tensors_of(model) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters(remove_duplicate=False)}


def flip_a_bit(name: str, model, before) -> None:
    tensors_of(model)[name].view(torch.uint8)[(0,) * tensors_of(model)[name].ndim] ^= 4


def swap(name: str, model, before) -> None:
    """Exchange the first two experts, or rows."""
    tensor = tensors_of(model)[name]
    tensor[:2] = tensor[:2].flip(0).clone()


def keep(names: tuple[str, ...], model, before) -> None:
    """Leave tensors as they were before the push."""
    for name in names:
        tensors_of(model)[name].copy_(before[name])


def exchange(one: str, other: str, model, before) -> None:
    """Let two layers have each other's weights."""
    tensors = tensors_of(model)
    saved = tensors[one].clone()
    tensors[one].copy_(tensors[other])
    tensors[other].copy_(saved)


def empty(name: str, model, before) -> None:
    tensors_of(model)[name].zero_()


def damage(worker, rank: int, how: Damage) -> None:
    """Do this damage in the next push, on one rank."""
    from megatron_rl.bridge.model_parameters import ModelParameters

    model = worker.model_runner.get_model()
    before = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    verify = ModelParameters._verify

    def damaged(self):
        ModelParameters._verify = verify
        if worker.parallel_config.rank == rank:
            how(model, before)
        return verify(self)

    ModelParameters._verify = damaged


def damaging(rank: int, how: Damage) -> Callable:
    return partial(damage, rank=rank, how=how)


def refused(stage, folders: tuple[Path, Path], rank: int, how: Damage) -> str:
    """Push sound weights, then others that one rank damages; the error of the second push."""
    stage.push(folders[0], 0)
    assert len(stage.run(stage.generate([PROMPT], 1, version=0, seed=0))[0]) == 1
    stage.rejoin()
    stage.run(called_in_workers(stage.engine, damaging(rank, how)))
    stage.trainers.begin_push(folders[1], 1)
    with pytest.raises(RuntimeError) as error:
        stage.run(stage.engine.weights.receive(1))
    stage.trainers.end_push()
    with pytest.raises(ValueError, match="holds no whole set of weights"):
        stage.run(stage.generate([PROMPT], 1, version=1, seed=0))
    stage.rejoin()
    return str(error.value)
