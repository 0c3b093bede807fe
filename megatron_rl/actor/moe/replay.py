"""Routing replay: the trainer sends every token to the experts that the engine chose for it (rollout routing replay,
R3: Ma et al. 2025, arXiv:2510.11370).

Engine and trainer round differently, so the scores of two experts that are nearly equal may have another order in the
trainer. The token then goes through another expert, and its log-probs, and the log-probs of all later tokens, change by
much more than rounding. With replay only the choice is the engine's. The experts' weights are the trainer's own scores
of the chosen experts, with their gradient.

A router gets the choices with the packed row (`Router.take_row`). Tokens whose choices are not known (the last one of
each sample, padding) get the trainer's own.

Invariants (tests/ranks): loss and gradient with given choices equal plain PyTorch, and are the same in every layout.

Shape letters: T tokens of a rank, L layers of the model, K active experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.actor.packing import RoutedRow


class Replay:
    """The choice of experts of one router. Megatron asks its attribute `router_replay` for it."""

    def __init__(self, layer: int) -> None:
        """
        Args:
            layer: the index of the layer in the whole model.
        """
        self._layer = layer
        self.row: RoutedRow | None = None
        self.counts = torch.zeros(2, dtype=torch.int64, device=platform.device())
        """Two numbers over the passes with gradients: the choices of experts that this rank replayed, and how many of
        them its router would not have made."""

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
        if self.row is None or self.row.routes is None:
            return own_score_TK, own_TK
        known_T1 = self.row.routes.is_known_T[:, None]
        given_TK = self.row.routes.expert_TLK[:, self._layer].long()
        if torch.is_grad_enabled():
            is_own_TK = (given_TK[:, :, None] == own_TK[:, None]).any(-1)
            count_T1 = self.row.multiplicity_T[:, None] * known_T1
            self.counts += torch.stack((count_T1.sum() * topk, (count_T1 * ~is_own_TK).sum()))
        chosen_TK = torch.where(known_T1, given_TK, own_TK)
        return score_TE.gather(1, chosen_TK), chosen_TK
