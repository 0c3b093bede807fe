"""The routers of mixtures of experts: the load of the experts, auxiliary losses, and the update of the bias in routers
that choose by score plus bias (DeepSeek-V3).

A router learns of a packed row from `PackedSequences`, which Megatron gives to each layer in the forward pass, and
again when it recomputes the layer in the backward pass, even if the pipeline works on other micro-batches in between. A
token that several samples share counts once for each of them, in every sum here.

The auxiliary losses are computed here and not by Megatron, whose load-balancing loss is a product of means over a
micro-batch, and whose z-loss is weighted by micro-batches: both would depend on how a mini-batch is cut. With the
experts' shares of a whole mini-batch, which a forward pass before the update counts, both are sums over tokens.

The bias balances the experts' load without a loss (Wang et al. 2024, arXiv:2408.15664). After an optimizer step the
bias of experts with more tokens than the average is lowered by a constant, and the other experts' bias is raised.
Tokens are counted here and not by Megatron, for three reasons: Megatron counts padding, so that the update would depend
on the layout; it updates before it is known whether the gradients are finite; and it counts in a method that torch
compiles. Megatron's own counters stay 0, so its own update changes nothing.

Invariants (tests/ranks): each token of a mini-batch counts once in every layout, also with recomputation and with
shared prompts; the auxiliary losses have the same gradient in every layout; a step that is refused changes no bias.

Shape letters: T tokens of a rank, R routers of a rank, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.actor.moe.replay import Replay
from megatron_rl.actor.packing import RoutedRow
from megatron_rl.algorithms.objective import Metric
from megatron_rl.config.policy import PolicyConfig
from megatron_rl.models.multi_token import is_of_head


class Router(TopKRouter):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.load_E = torch.zeros(self.num_experts, dtype=torch.int64, device=platform.device())
        """The number of this rank's tokens that each expert got since `start_counting`."""
        self.counts_with_gradients = True
        """Whether tokens count in passes with gradients, or in those without."""
        self.score_weight_E: Tensor | None = None
        """The factor of a token's score of each expert in the load-balancing loss; None if there is no such loss."""
        self.z_weight = 0.0
        """The factor of a token's z-loss."""
        self.auxiliary_loss = torch.zeros((), device=platform.device())
        """The sum of this rank's auxiliary losses since `start_counting`."""
        self.row: RoutedRow | None = None
        """What it knows of the present row; None in a multi-token head."""

    def take_row(self, layer: torch.nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Take the row that the layer is about to compute."""
        self.row = named["packed_seq_params"].routed
        if self.router_replay is not None:
            self.router_replay.row = self.row

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Megatron calls this before the choice of experts.

        Args:
            logits: [T, E].

        Returns:
            The logits. Their gradient contains the gradients of both auxiliary losses.
        """
        if not torch.is_grad_enabled() or (self.score_weight_E is None and not self.z_weight):
            return logits
        assert self.row is not None, "a router with these losses has it"
        loss_T = self.z_weight * logits.logsumexp(-1).square()
        if self.score_weight_E is not None:
            softmax = self.score_function == "softmax"
            score_TE = logits.softmax(-1) if softmax else F.normalize(logits.sigmoid(), p=1, dim=-1)
            loss_T = loss_T + score_TE @ self.score_weight_E
        loss = (loss_T * self.row.multiplicity_T).sum()
        self.auxiliary_loss += loss.detach()
        attached: Tensor = _Attached.apply(logits, loss)  # type: ignore[no-untyped-call]  # it has no types
        return attached

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Megatron calls this after the choice of experts. With recomputation only the second of the two forward passes
        has gradients, so a token counts once.

        Args:
            routing_map: bool [T, E]: the experts of each token.
        """
        if torch.is_grad_enabled() == self.counts_with_gradients and self.row is not None:
            self.load_E += (routing_map * self.row.multiplicity_T[:, None]).sum(0)


class _Attached(torch.autograd.Function):
    """Returns `x`, and adds `loss`, times the loss scale, to what is differentiated. Megatron's schedule has set the
    scale for the micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, MoEAuxLossAutoScaler.main_loss_backward_scale.to(gradient.dtype).view(())


def prepare_routers(gpt: GPTModel, replays: bool) -> None:
    """Let the routers of a model take the rows of its layers, and replay the choices of experts that come with them."""
    for layer in gpt.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            router = layer.mlp.router
            router.router_replay = Replay(layer.layer_number - 1) if replays else None
            layer.register_forward_pre_hook(router.take_row, with_kwargs=True)


def keep_biases_in_float32(chunks: Sequence[torch.nn.Module]) -> None:
    """Undo what Megatron's wrapper for bf16 does to buffers, before weights are loaded."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Router):
                module._maintain_float32_expert_bias()


def start_counting(chunks: Sequence[torch.nn.Module], with_gradients: bool = True) -> None:
    """Count from 0 in the passes that follow: in passes with gradients, or in passes without."""
    for router in _routers(chunks):
        router.load_E.zero_()
        router.auxiliary_loss.zero_()
        if router.router_replay is not None:
            router.router_replay.counts.zero_()
        router.counts_with_gradients = with_gradients


def total_load(chunks: Sequence[torch.nn.Module]) -> Tensor | None:
    """int64 [R, E]: the number of tokens that each expert got since `start_counting`, of all ranks of the pipeline
    stage, which call this together. None if the stage has no routers.

    Args:
        chunks: the rank's models, one for each virtual stage.
    """
    loads = [router.load_E for router in _routers(chunks)]
    return _sum_over_stage(torch.stack(loads)) if loads else None


def total_replay(chunks: Sequence[torch.nn.Module]) -> Tensor:
    """int64 [R, 2]: the sum of `Replay.counts` over all ranks of the pipeline stage, which call this together."""
    return _sum_over_stage(torch.stack([router.router_replay.counts for router in _routers(chunks)]))


def _sum_over_stage(counts: Tensor) -> Tensor:
    dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    return counts


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


def describe_replay(count_R2: Tensor, load_RE: Tensor, num_mixtures: int) -> dict[str, Metric]:
    """A pipeline stage's part of the metrics of a mini-batch:
        routing/replayed: the share of the choices of experts that were the engine's.
        routing/differing: the share of these that the trainer would not have made.

    Args:
        count_R2: see `total_replay`.
        load_RE, num_mixtures: see `describe_load`.
    """
    replayed_R, differing_R = count_R2.double().unbind(1)
    return {
        "routing/replayed": Metric((replayed_R / load_RE.sum(1)).sum() / num_mixtures, "sum"),
        "routing/differing": Metric((differing_R / replayed_R.clamp(min=1)).sum() / num_mixtures, "sum"),
    }


def set_auxiliary_losses(
    chunks: Sequence[torch.nn.Module], policy: PolicyConfig, num_tokens: int, load_RE: Tensor | None
) -> None:
    """Set the weights of the auxiliary losses of a mini-batch.

    Args:
        num_tokens: the number of tokens of the mini-batch, of all ranks, without padding.
        load_RE: see `total_load`; needed for the load-balancing loss alone.
    """
    for number, router in enumerate(_routers(chunks)):
        router.z_weight = policy.router_z_loss / num_tokens
        if policy.load_balancing_loss:
            assert load_RE is not None, "the experts' shares of the mini-batch have been counted"
            share_E = (load_RE[number] / load_RE[number].sum()).float()
            router.score_weight_E = policy.load_balancing_loss * router.num_experts / num_tokens * share_E


def clear_auxiliary_losses(chunks: Sequence[torch.nn.Module]) -> None:
    """Leave the auxiliary losses out of the passes that follow."""
    for router in _routers(chunks):
        router.z_weight, router.score_weight_E = 0.0, None


def describe_auxiliary_losses(chunks: Sequence[torch.nn.Module]) -> dict[str, Metric]:
    """This rank's part of the metric `experts/auxiliary_loss`: the sum of both losses over all layers."""
    losses = [router.auxiliary_loss for router in _routers(chunks)]
    return {"experts/auxiliary_loss": Metric(torch.stack(losses).sum(), "sum")} if losses else {}


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
    """The routers of the model's layers. The router of a multi-token head is not one of them: its bias stays, and no
    metric or loss counts its tokens."""
    modules = (named for chunk in chunks for named in chunk.named_modules())
    return (module for name, module in modules if isinstance(module, Router) and not is_of_head(name))
