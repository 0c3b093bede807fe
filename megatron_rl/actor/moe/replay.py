"""Routing replay: the trainer sends every token to the experts that the engine chose for it (rollout routing replay,
R3: Ma et al. 2025, arXiv:2510.11370).

Engine and trainer round differently, so the scores of two experts that are nearly equal may have another order in the
trainer. The token then goes through another expert, and its log-probs, and the log-probs of all later tokens, change by
much more than rounding. With replay only the choice is the engine's. The experts' weights are the trainer's own scores
of the chosen experts, with their gradient.

A router gets the choices with the packed row (`PackedSequences.routes`), which Megatron gives to each layer in the
forward pass, and again when it recomputes the layer in the backward pass. So every pass over a micro-batch replays the
same choices, even if the pipeline works on other micro-batches in between. Tokens whose choices are not known (the last
one of each sample, padding) get the trainer's own.

Invariants (tests/ranks): loss and gradient with given choices equal plain PyTorch, and are the same in every layout.

Shape letters: T tokens of a rank, L layers of the model, K active experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.actor.packing import Routes


class Replay:
    """The choice of experts of one router. Megatron asks its attribute `router_replay` for it."""

    def __init__(self, layer: int) -> None:
        """
        Args:
            layer: the index of the layer in the whole model.
        """
        self._layer = layer
        self._routes: Routes | None = None
        self.counts = torch.zeros(2, dtype=torch.int64, device=platform.device())
        """Two numbers over the passes with gradients: the choices of experts that this rank replayed, and how many of
        them its router would not have made."""

    def take_routes(self, layer: torch.nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Take the choices of the micro-batch that the layer is about to compute."""
        self._routes = named["packed_seq_params"].routes

    def get_replay_topk(
        self,
        score_TE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """The scores and the indices of the chosen experts, both [T, K].

        Args:
            choose: the router's own choice, with the same arguments.
        """
        own_score_TK, own_TK = choose(score_TE, topk, num_groups=num_groups, group_topk=group_topk)
        if self._routes is None:
            return own_score_TK, own_TK
        known_T1 = self._routes.is_known_T[:, None]
        given_TK = self._routes.expert_TLK[:, self._layer].long()
        if torch.is_grad_enabled():
            is_own_TK = (given_TK[:, :, None] == own_TK[:, None]).any(-1)
            self.counts += torch.stack((known_T1.sum() * topk, (known_T1 & ~is_own_TK).sum()))
        chosen_TK = torch.where(known_T1, given_TK, own_TK)
        return score_TE.gather(1, chosen_TK), chosen_TK


def replay_routes(gpt: GPTModel) -> None:
    """Let the routers of a model replay the choices that come with its packed rows."""
    for layer in gpt.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            replay = Replay(layer.layer_number - 1)
            layer.mlp.router.router_replay = replay
            layer.register_forward_pre_hook(replay.take_routes, with_kwargs=True)
