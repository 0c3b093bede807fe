"""The routers of mixtures of experts: the load of the experts, and the update of the bias of those that choose by score
plus bias (DeepSeek-V3).

The bias balances the experts' load without a loss (Wang et al. 2024, arXiv:2408.15664). After an optimizer step the
bias of experts with more tokens than the average is lowered by a constant, and that of the others is raised. Tokens are
counted here and not by Megatron, for three reasons: Megatron counts padding, so that the update would depend on the
layout; it updates before it is known whether the gradients are finite; and it counts in a method that torch compiles.
Megatron's own counters stay 0, so its own update changes nothing.

Invariants (tests/dist): each token of a mini-batch counts once in every layout, also with recomputation; passes without
gradients do not count; a step that is refused changes no bias.

Shape letters: T tokens of a rank, R routers of a rank, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.algorithms.objective import Metric


class Router(TopKRouter):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.load_E = torch.zeros(self.num_experts, dtype=torch.int64, device=platform.device())
        """The number of this rank's tokens that each expert got since `start_counting`."""

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Megatron calls this after the choice of experts. With recomputation the first of the two forward passes has
        no gradients, so a token counts once.

        Args:
            routing_map: bool [T, E]: the experts of each token.
            padding_mask: bool [T]: True where the row is padded; None if padding was not told.
        """
        if torch.is_grad_enabled() and padding_mask is not None:
            self.load_E += (routing_map & ~padding_mask[:, None]).sum(0)


def padding_mask(padding_T: Tensor, gpt: GPTModel) -> Tensor | None:
    """The argument `padding_mask` of a pipeline stage, bool [1, T]; None if the model has no routers. With sequence
    parallelism the first stage gives each rank its part of the row, and the other stages need it given."""
    if gpt.config.num_moe_experts is None:
        return None
    if gpt.config.sequence_parallel and not gpt.pre_process:
        group = parallel_state.get_tensor_model_parallel_group()
        padding_T = padding_T.chunk(group.size())[group.rank()]
    return padding_T[None]


def keep_biases_in_float32(chunks: Sequence[torch.nn.Module]) -> None:
    """Undo what Megatron's wrapper for bf16 does to buffers, before weights are loaded."""
    for router in _routers(chunks):
        router._maintain_float32_expert_bias()


def start_counting(chunks: Sequence[torch.nn.Module]) -> None:
    for router in _routers(chunks):
        router.load_E.zero_()


def total_load(chunks: Sequence[torch.nn.Module]) -> Tensor | None:
    """int64 [R, E]: the number of tokens that each expert got since `start_counting`, of all ranks of the pipeline
    stage, which call this together. None if the stage has no routers.

    Args:
        chunks: the rank's models, one for each virtual stage.
    """
    loads = [router.load_E for router in _routers(chunks)]
    if not loads:
        return None
    load_RE = torch.stack(loads)
    dist.all_reduce(load_RE, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    return load_RE


def describe_load(load_RE: Tensor, num_mixtures: int) -> dict[str, Metric]:
    """A pipeline stage's part of the metrics of a mini-batch:
        experts/load/max: the tokens of a layer's busiest expert, divided by the mean of its experts; of the worst
            layer.
        experts/load_mean: the same, as the mean over the layers.
        experts/unused: the share of the experts that got no token, as the mean over the layers.

    Args:
        load_RE: see `total_load`.
        num_mixtures: the number of layers with experts in the whole model.
    """
    load_RE = load_RE.double()
    ratio_R = load_RE.amax(1) / load_RE.mean(1)
    return {
        "experts/load/max": Metric(ratio_R.max(), "max"),
        "experts/load_mean": Metric(ratio_R.sum() / num_mixtures, "sum"),
        "experts/unused": Metric((load_RE == 0).double().mean(1).sum() / num_mixtures, "sum"),
    }


@torch.no_grad()
def update_biases(chunks: Sequence[torch.nn.Module], load_RE: Tensor, rate: float) -> None:
    """Add rate * sign(mean load - load) to every bias.

    Args:
        load_RE: see `total_load`.
    """
    for router, load_E in zip(_routers(chunks), load_RE, strict=True):
        below_E = (load_E.sum() - len(load_E) * load_E).sign()  # of integers, so that no rounding decides
        router.expert_bias.add_(below_E, alpha=rate)


def _routers(chunks: Sequence[torch.nn.Module]) -> Iterator[Router]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router))
