"""Advantages at tokens from rewards at tokens: generalised advantage estimation, and returns to go.

Invariants: only the actions of a sample count. Forced tokens, prompts and padding are skipped, and their numbers, even
NaN, have no effect. Samples that are neighbours in the packed row do not affect each other. The result depends neither
on the packing nor on how the samples are split over ranks.

A sample that abstained has no reward: its action mask must be cleared before.

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
    """The actions of a packed row, in the order of the row."""

    position_N: Tensor
    """int64: the action's position in the row."""
    sample_N: Tensor
    """int64: the action's sample."""
    continues_N: Tensor
    """float64: 1 if the next action belongs to the same sample, 0 at the last action of a sample."""
    length_N: Tensor
    """int64: the number of actions in the action's sample."""

    @classmethod
    def of(cls, action_mask_T: Tensor, sample_T: Tensor) -> Actions:
        """
        Args:
            action_mask_T: bool [T].
            sample_T: int64 [T], the sample of each token.

        Raises:
            ValueError: the tokens of a sample are not adjacent.
        """
        position_N = action_mask_T.nonzero().flatten()
        sample_N = sample_T[position_N]
        samples, run_N, length = torch.unique_consecutive(sample_N, return_inverse=True, return_counts=True)
        if samples.numel() != samples.unique().numel():
            raise ValueError("the tokens of a sample must be adjacent in the packed row, but a sample is in two pieces")
        continues_N = torch.zeros(sample_N.shape, dtype=torch.float64, device=sample_N.device)
        continues_N[:-1] = (run_N[1:] == run_N[:-1]).double()
        return cls(position_N, sample_N, continues_N, length[run_N])

    def pick(self, x_T: Tensor, name: str) -> Tensor:
        """The entries at the actions, float64 [N].

        Raises:
            ValueError: an entry is not finite; the message gives its sample.
        """
        x_N = x_T[self.position_N].double()
        bad = (~x_N.isfinite()).nonzero().flatten()
        if bad.numel():
            first = int(bad[0])
            raise ValueError(
                f"{name} of sample {int(self.sample_N[first])} is {float(x_N[first])} at packed position "
                f"{int(self.position_N[first])} ({bad.numel()} action tokens are not finite); clear the action mask of "
                f"samples without a reward"
            )
        return x_N

    def place(self, x_N: Tensor, like_T: Tensor) -> Tensor:
        """A tensor [T] with x at the actions and 0 elsewhere, in the dtype of `like_T`."""
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
    `lam_critic` the critic's targets have their own lambda (VC-PPO, Yuan et al. 2025, arXiv:2503.01491). With
    `length_adaptive_alpha` the lambda of the policy is 1 - 1 / (alpha n) for a sample of n actions, but not below 0
    (VAPO, Yue et al. 2025, arXiv:2504.05118).

    Args:
        reward_T: float [T]. An outcome reward is at the last action of its sample, and a KL penalty is at every
            action.
        value_T: float [T], the value V of the state before the token.
        action_mask_T: bool [T].
        sample_T: int64 [T]; a sample's tokens are adjacent.
        sum_over_ranks: the sum for the whitening. Every rank must call this function.

    Returns:
        advantage_T: the advantages, with `cfg.whiten` whitened over all action tokens of all ranks; 0 where there is no
            action.
        return_T: the critic's targets V + A, not whitened; 0 where there is no action.
        Both have the dtype of reward_T.

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
    """REINFORCE++ for rewards at tokens (Hu et al. 2025, arXiv:2501.03262): A_t = r_t + gamma A_t+1, and with
    `whitened` the result is whitened over all action tokens of all ranks. A KL in the reward gives every token the
    reward r_t = -beta kl_t, and the last action also the outcome. With outcome rewards alone and gamma 1 this equals
    `outcomes.reinforce_plus_plus`.

    The arguments and errors are the same as for `gae`. Returns advantage_T in the dtype of reward_T; 0 where there is
    no action.
    """
    actions = Actions.of(action_mask_T, sample_T)
    return_N = reverse_scan(actions.pick(reward_T, "the reward"), gamma * actions.continues_N)
    return actions.place(whiten(return_N, sum_over_ranks) if whitened else return_N, reward_T)


def reverse_scan(x_N: Tensor, decay_N: Tensor) -> Tensor:
    """The solution of y_t = x_t + decay_t y_t+1, with y = 0 after the end. A decay of 0 ends a chain.

    The recurrence over 2s steps follows from two recurrences over s steps, so log2(N) vector operations replace N steps
    (Hillis and Steele 1986).
    """
    step = 1
    while step < x_N.numel():
        ahead_N, decay_ahead_N = torch.zeros_like(x_N), torch.zeros_like(decay_N)
        ahead_N[:-step], decay_ahead_N[:-step] = x_N[step:], decay_N[step:]
        x_N, decay_N, step = x_N + decay_N * ahead_N, decay_N * decay_ahead_N, 2 * step
    return x_N
