"""The router of models that choose experts by score plus bias (DeepSeek-V3), and the update of its bias.

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


class BiasedRouter(TopKRouter):
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
    """The argument `padding_mask` of a pipeline stage, bool [1, T]; None if the model has no biased routers. With
    sequence parallelism the first stage gives each rank its part of the row, and the other stages need it given."""
    if not gpt.config.moe_router_enable_expert_bias:
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


@torch.no_grad()
def update_biases(chunks: Sequence[torch.nn.Module], rate: float) -> None:
    """Add rate * sign(mean load - load) to every bias, from the tokens of all ranks since `start_counting`.
    All ranks of a pipeline stage call this together.

    Args:
        chunks: the rank's models, one for each virtual stage.
    """
    routers = list(_routers(chunks))
    if not routers:
        return
    load_RE = torch.stack([router.load_E for router in routers])
    dist.all_reduce(load_RE, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    for router, load_E in zip(routers, load_RE, strict=True):
        below_E = (load_E.sum() - len(load_E) * load_E).sign()  # of integers, so that no rounding decides
        router.expert_bias.add_(below_E, alpha=rate)


def _routers(chunks: Sequence[torch.nn.Module]) -> Iterator[BiasedRouter]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, BiasedRouter))
