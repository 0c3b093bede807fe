"""The advantages of a step's tokens, for estimators that give each token its own (algorithms/token_advantages.py)."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.actor.packing import Microbatch
from megatron_rl.algorithms.objective import NotFiniteError, require_finite


def require_finite_rewards(rows: Iterable[Microbatch]) -> None:
    """
    Raises:
        ValueError: what a token's reward is computed from is not finite; the message names the sample.
    """
    for batch in rows:
        columns = batch.columns
        given = {"the reward": columns.reward_T, "the value": columns.value_T}
        given |= {"logp_old": columns.logp_old_T, "logp_ref": columns.logp_ref_T}
        try:
            require_finite(columns, {name: x_T for name, x_T in given.items() if x_T is not None})
        except NotFiniteError as error:
            raise ValueError(f"sample {batch.names[error.sample]}: {error}") from None
