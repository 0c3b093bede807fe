"""Policy losses. Each has a short file, and a line here whose key is the class of its configuration."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_rl.algorithms.losses.a2po import a2po_loss
from megatron_rl.algorithms.losses.cispo import cispo_loss
from megatron_rl.algorithms.losses.covariance import choose_clip_cov, choose_kl_cov, clip_cov_loss, kl_cov_loss
from megatron_rl.algorithms.losses.dppo import dppo_loss
from megatron_rl.algorithms.losses.dro import dro_loss
from megatron_rl.algorithms.losses.dual_clip import dual_clip_loss
from megatron_rl.algorithms.losses.function import function_loss
from megatron_rl.algorithms.losses.gmpo import gmpo_loss
from megatron_rl.algorithms.losses.gspo import gspo_loss
from megatron_rl.algorithms.losses.reinforce import reinforce_loss
from megatron_rl.algorithms.losses.sapo import sapo_loss
from megatron_rl.algorithms.losses.terms import TokenLoss
from megatron_rl.algorithms.losses.vespo import vespo_loss
from megatron_rl.config import losses as config

LOSSES: dict[type, Callable[..., TokenLoss]] = {
    config.DualClipLoss: dual_clip_loss,
    config.GspoLoss: gspo_loss,
    config.GmpoLoss: gmpo_loss,
    config.CispoLoss: cispo_loss,
    config.SapoLoss: sapo_loss,
    config.DroLoss: dro_loss,
    config.A2poLoss: a2po_loss,
    config.VespoLoss: vespo_loss,
    config.ReinforceLoss: reinforce_loss,
    config.GpgLoss: reinforce_loss,
    config.ClipCovLoss: clip_cov_loss,
    config.KlCovLoss: kl_cov_loss,
    config.DppoTvLoss: dppo_loss,
    config.DppoKlLoss: dppo_loss,
    config.FunctionLoss: function_loss,
}

SELECTIONS: dict[type, Callable[..., list[Tensor]]] = {
    config.ClipCovLoss: choose_clip_cov,
    config.KlCovLoss: choose_kl_cov,
}
"""How a loss that treats some tokens differently chooses them from the whole mini-batch, before the update."""
