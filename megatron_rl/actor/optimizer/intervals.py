"""The parts of parameters that a rank updates, and the state of these parts, for every kind of optimizer.

With Megatron's distributed optimizer a rank has a flat interval of each parameter, otherwise the whole. Invariant
(tests/ranks): the intervals of a parameter's data-parallel ranks follow each other without gap or overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

COPY = "fp32_param"
"""The name of the part of the state that is the fp32 copy of a parameter in bfloat16 or float16."""


@dataclass(frozen=True, slots=True)
class IntervalState:
    """The state of the flat interval [start, stop) of a parameter. Writing to its tensors changes the optimizer."""

    name: str
    """The parameter's local name."""
    start: int
    stop: int
    tensors: dict[str, Tensor]
    """[stop - start]: what the kind keeps (`config.optimizer.moments`), and COPY unless the parameter is float32."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The flat interval [start, stop) of a parameter that one of Megatron's optimizers updates."""

    parameter: Parameter
    main: Tensor
    """float32, stop - start elements: what Megatron gives the gradient of the interval to. It is the parameter itself
    or a view of it, or the fp32 copy of one in two bytes; with a streamed optimizer a placeholder of this copy."""
    start: int
    stop: int
    group: int
    """The index of its settings in `param_groups`."""

    @property
    def has_copy(self) -> bool:
        return self.parameter.dtype != torch.float32


def intervals(inner: MegatronOptimizer) -> Iterator[Interval]:
    """Yield the interval of each parameter that one of Megatron's optimizers, not a chain of them, has a part of."""
    if isinstance(inner, DistributedOptimizer):
        # Megatron's map counts the members of a group in the order of its buffers, but in the group itself those in
        # float32 come first. So with parameters of both kinds its own numbers are wrong.
        of_group: dict[int, list[Parameter]] = {}
        for parameter, (group, _) in inner.model_param_group_index_map.items():
            of_group.setdefault(group, []).append(parameter)
        for group, parameters in of_group.items():
            alike = sorted(parameters, key=lambda parameter: parameter.dtype != torch.float32)
            mains = inner.optimizer.param_groups[group]["params"]
            for parameter, main in zip(alike, mains, strict=True):
                found = inner._get_model_param_range_map(parameter)["param"]
                yield Interval(parameter, main, found.start, found.end, group)
        return
    if isinstance(inner, FP32Optimizer):
        pairs = [[(p, p) for p in group["params"]] for group in inner.optimizer.param_groups]
    else:
        groups = zip(inner.float16_groups, inner.fp32_from_float16_groups, inner.fp32_from_fp32_groups, strict=True)
        pairs = [[*zip(halves, mains, strict=True), *((p, p) for p in wholes)] for halves, mains, wholes in groups]
    for group, members in enumerate(pairs):
        for parameter, main in members:
            yield Interval(parameter, main, 0, parameter.numel(), group)
