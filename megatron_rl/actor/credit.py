"""The advantages of a step's tokens, for estimators that give each token its own (algorithms/token_advantages.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megatron_rl.actor.packing import Microbatch
from megatron_rl.algorithms.objective import NotFiniteError, Objective, require_finite
from megatron_rl.algorithms.whitening import SumOverRanks


def require_finite_rewards(minibatches: Sequence[Sequence[Microbatch]]) -> None:
    """
    Raises:
        ValueError: what a token's reward is computed from is not finite; the message names the sample.
    """
    for batch in (batch for minibatch in minibatches for batch in minibatch):
        columns = batch.columns
        given = {"the reward": columns.reward_T, "the value": columns.value_T}
        given |= {"logp_old": columns.logp_old_T, "logp_ref": columns.logp_ref_T}
        try:
            require_finite(columns, {name: x_T for name, x_T in given.items() if x_T is not None})
        except NotFiniteError as error:
            raise ValueError(f"sample {batch.names[error.sample]}: {error}") from None


def with_credit(
    objective: Objective,
    minibatches: Sequence[Sequence[Microbatch]],
    coefficients: Mapping[str, float],
    sum_over_ranks: SumOverRanks,
) -> tuple[list[list[Microbatch]], Tensor]:
    """The micro-batches of a step with the advantages of their tokens, and the sum of the KL over this rank's actions;
    see `token_advantages`. Collective: every rank must call it."""
    columns = [batch.columns for minibatch in minibatches for batch in minibatch]
    in_force = coefficients["kl"] if objective.needs.logp_old_in_credit else 0.0
    columns, kl = objective.credit(columns, in_force, sum_over_ranks)
    remaining = iter(columns)
    return [[replace(batch, columns=next(remaining)) for batch in own] for own in minibatches], kl
