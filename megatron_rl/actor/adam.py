"""The state of Megatron's Adam for each parameter, wherever its optimizers keep it.

With the distributed optimizer a rank has a flat interval of each parameter's state, otherwise the whole. The state is a
view: writing to it changes the optimizer. Invariant (tests/dist): the intervals of a parameter's data-parallel ranks
follow each other without gap or overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from torch import Tensor

from megatron_rl.actor.state import named_parameters


@dataclass(frozen=True, slots=True)
class AdamState:
    """The state of the flat interval [start, stop) of a parameter."""

    name: str
    """The parameter's local name."""
    start: int
    stop: int
    tensors: dict[str, Tensor]
    """float32 [stop - start]: `exp_avg`, `exp_avg_sq`, and `fp32_param` if the parameter is bfloat16."""


def adam_states(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> Iterator[AdamState]:
    """The states of this rank. Moments that no update has touched yet are made, as zeros."""
    names = {id(parameter): name for name, parameter in named_parameters(chunks)}
    for inner in optimizer.chained_optimizers:
        for parameter, main, start, stop in _mains(inner):
            moments = inner.optimizer.state[main]
            if "exp_avg" not in moments:
                moments |= {"exp_avg": torch.zeros_like(main), "exp_avg_sq": torch.zeros_like(main)}
                if isinstance(inner.optimizer, torch.optim.AdamW):
                    moments["step"] = torch.tensor(0.0)  # as torch itself begins
            tensors = {kind: moments[kind].view(-1) for kind in ("exp_avg", "exp_avg_sq")}
            if parameter.dtype != torch.float32:
                tensors["fp32_param"] = main.detach().view(-1)
            yield AdamState(names[id(parameter)], start, stop, tensors)


def set_num_updates(optimizer: MegatronOptimizer, num_updates: int) -> None:
    """Set the number of updates that Adam corrects its moments by. torch's AdamW has it for each parameter, the fused
    ones of Apex and Transformer Engine for each group."""
    for inner in optimizer.chained_optimizers:
        if isinstance(inner.optimizer, torch.optim.AdamW):
            for moments in inner.optimizer.state.values():
                moments["step"].fill_(num_updates)
        else:
            for group in inner.optimizer.param_groups:
                group["step"] = num_updates


def _mains(inner: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """(parameter, the tensor that Adam updates, start, stop): the tensor is float32, and holds the interval [start,
    stop) of the parameter."""
    if isinstance(inner, DistributedOptimizer):
        for parameter, (group, order) in inner.model_param_group_index_map.items():
            interval = inner._get_model_param_range_map(parameter)["param"]
            yield parameter, inner.optimizer.param_groups[group]["params"][order], interval.start, interval.end
        return
    if isinstance(inner, FP32Optimizer):
        pairs = [(parameter, parameter) for group in inner.optimizer.param_groups for parameter in group["params"]]
    else:
        pairs = [
            pair
            for models, mains in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True)
            for pair in zip(models, mains, strict=True)
        ]
        pairs += [(parameter, parameter) for group in inner.fp32_from_fp32_groups for parameter in group]
    for parameter, main in pairs:
        yield parameter, main, 0, parameter.numel()
