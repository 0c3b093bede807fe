"""Advantages at tokens, from rewards at tokens: generalised advantage estimation and rewards to go.

Invariants: the chain of rewards and values runs over a sample's actions only: forced tokens, prompts and padding are
skipped, and what stands there, NaN included, reaches nothing. A sample never sees its neighbours in the packed row.
The result does not depend on the packing, nor on how the samples were split over ranks.

A sample that abstained has no reward: clear its action mask before.

Shape letters: T packed tokens, N their actions in order, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.whitening import SumOverRanks, one_rank, whiten
from megatron_rl.config.advantages import GaeAdvantage


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions of a packed row, sample after sample."""

    position_N: Tensor
    """int64: where they stand in the row."""
    sample_N: Tensor
    """int64: their sample."""
    continues_N: Tensor
    """float64: 1 where the next action is of the same sample, 0 at a sample's last."""
    length_N: Tensor
    """int64: number of actions of their sample."""

    @classmethod
    def of(cls, action_mask_T: Tensor, sample_T: Tensor) -> Actions:
        """Args: bool [T]; int64 [T], the sample of each token. Raises: ValueError, a sample lies in two pieces."""
        position_N = action_mask_T.nonzero().flatten()
        sample_N = sample_T[position_N]
        samples, run_N, length = torch.unique_consecutive(sample_N, return_inverse=True, return_counts=True)
        if samples.numel() != samples.unique().numel():
            raise ValueError("the tokens of a sample must be adjacent in the packed row; one lies in two pieces")
        continues_N = torch.zeros(sample_N.shape, dtype=torch.float64, device=sample_N.device)
        continues_N[:-1] = (run_N[1:] == run_N[:-1]).double()
        return cls(position_N, sample_N, continues_N, length[run_N])

    def pick(self, x_T: Tensor, name: str) -> Tensor:
        """The entries at the actions, float64 [N]; ValueError names the sample of one that is not finite."""
        x_N = x_T[self.position_N].double()
        bad = (~x_N.isfinite()).nonzero().flatten()
        if bad.numel():
            first = int(bad[0])
            raise ValueError(
                f"{name} of sample {int(self.sample_N[first])} is {float(x_N[first])} at packed position "
                f"{int(self.position_N[first])} ({bad.numel()} action tokens are not finite): a sample without reward "
                f"leaves before, by its action mask"
            )
        return x_N

    def place(self, x_N: Tensor, like_T: Tensor) -> Tensor:
        """[T] with x at the actions and 0 elsewhere, in the type of `like_T`."""
        return torch.zeros_like(like_T).index_copy_(0, self.position_N, x_N.to(like_T.dtype))


@torch.no_grad()
def gae(
    reward_T: Tensor,
    value_T: Tensor,
    action_mask_T: Tensor,
    sample_T: Tensor,
    cfg: GaeAdvantage,
    sum_over_ranks: SumOverRanks = one_rank,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    d_t = r_t + gamma V_t+1 - V_t, A_t = d_t + gamma lam A_t+1, V = A = 0 after the last action. With
    `lam_critic` the critic's targets have their own lambda (VC-PPO, Yuan et al. 2025, arXiv:2503.01491); with
    `length_adaptive_alpha` the policy's is 1 - 1 / (alpha n) for a sample of n actions (VAPO, Yue et al. 2025,
    arXiv:2504.05118), 0 where that is negative.

    Args:
        reward_T: float [T]; of an outcome at its sample's last action (`at_last_action`), of a KL at every one.
        value_T: float [T], V of the state in which the token was chosen.
        action_mask_T: bool [T].
        sample_T: int64 [T]; a sample's tokens are adjacent.
        sum_over_ranks: for the whitening; every rank must call.

    Returns:
        advantage_T: with `cfg.whiten` whitened over all action tokens of all ranks; 0 where there is no action.
        return_T: the critic's targets V + A, not whitened; 0 where there is no action.
        Both in the type of reward_T.

    Raises:
        ValueError: a reward or a value of an action is not finite.
    """
    actions = Actions.of(action_mask_T, sample_T)
    reward_N, value_N = actions.pick(reward_T, "the reward"), actions.pick(value_T, "the value")
    decay_N = cfg.gamma * actions.continues_N
    delta_N = reward_N + decay_N * value_N.roll(-1) - value_N
    lam: float | Tensor = cfg.lam
    if cfg.length_adaptive_alpha is not None:
        lam = (1 - 1 / (cfg.length_adaptive_alpha * actions.length_N.double())).clamp(min=0)
    lam_critic = cfg.lam if cfg.lam_critic is None else cfg.lam_critic
    advantage_N = reverse_scan(delta_N, lam * decay_N)
    if cfg.whiten:
        advantage_N = whiten(advantage_N, sum_over_ranks)
    return_N = value_N + reverse_scan(delta_N, lam_critic * decay_N)
    return actions.place(advantage_N, reward_T), actions.place(return_N, reward_T)


@torch.no_grad()
def returns_to_go(
    reward_T: Tensor,
    action_mask_T: Tensor,
    sample_T: Tensor,
    gamma: float = 1.0,
    sum_over_ranks: SumOverRanks = one_rank,
    *,
    whitened: bool = True,
) -> Tensor:
    """REINFORCE++ for rewards at tokens (Hu et al. 2025, arXiv:2501.03262): A_t = r_t + gamma A_t+1, `whitened` over
    all action tokens of all ranks. A KL in the reward is a reward at each token: r_t = -beta kl_t, and the outcome at
    the last action. With outcomes alone and gamma 1 it is `outcomes.reinforce_plus_plus`.

    Args and errors as of `gae`. Returns advantage_T in the type of reward_T; 0 where there is no action.
    """
    actions = Actions.of(action_mask_T, sample_T)
    return_N = reverse_scan(actions.pick(reward_T, "the reward"), gamma * actions.continues_N)
    return actions.place(whiten(return_N, sum_over_ranks) if whitened else return_N, reward_T)


def at_last_action(reward_S: Tensor, action_mask_T: Tensor, sample_T: Tensor) -> Tensor:
    """Outcome rewards as rewards at tokens: each at the last action of its sample, 0 elsewhere, [T]. A sample
    without actions has no place for its reward, and no gradient."""
    actions = Actions.of(action_mask_T, sample_T)
    last_N = actions.continues_N == 0
    reward_T = torch.zeros(action_mask_T.shape, dtype=reward_S.dtype, device=reward_S.device)
    return reward_T.index_copy_(0, actions.position_N[last_N], reward_S[actions.sample_N[last_N]])


def reverse_scan(x_N: Tensor, decay_N: Tensor) -> Tensor:
    """y_t = x_t + decay_t y_t+1, y = 0 after the end.

    The recurrence over 2s steps is that over s steps, twice: log2(N) vector operations in place of N steps (Hillis
    and Steele 1986). A decay of 0 ends a chain.
    """
    step = 1
    while step < x_N.numel():
        ahead_N, decay_ahead_N = torch.zeros_like(x_N), torch.zeros_like(decay_N)
        ahead_N[:-step], decay_ahead_N[:-step] = x_N[step:], decay_N[step:]
        x_N, decay_N, step = x_N + decay_N * ahead_N, decay_N * decay_ahead_N, 2 * step
    return x_N
