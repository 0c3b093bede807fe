"""The inputs that an objective needs, and the forward passes that they cost.

This needs no torch, so that a dry run counts the passes that the actor makes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Needs:
    """The inputs that an objective needs."""

    logp_old: bool = False
    """It needs `columns.logp_old_T`: the log-probs under the weights at the step's start, from a forward pass before
    the first update. If the step has only one update, the update itself computes the same log-probs. This pass can then
    be left out unless `before_update` is True: `logp_old_T` is None, and the objective detaches its own log-probs."""
    logp_ref: bool = False
    """It needs `columns.logp_ref_T`, from a forward pass of the reference policy."""
    entropy: bool = False
    """It needs the entropy of each token."""
    first_pass: bool = False
    """`prepare` needs log-probs and entropies under the weights that the update begins with."""
    logp_old_in_prepare: bool = False
    """`prepare` needs `columns.logp_old_T`, for statistics of the whole mini-batch."""
    token_advantages: bool = False
    """Each token has its own advantage: `credit` must be called."""
    logp_old_in_credit: bool = False
    """`credit` needs `columns.logp_old_T` and `columns.logp_ref_T`."""

    @property
    def before_update(self) -> bool:
        """Whether a mini-batch needs a forward pass of the policy before its update, even if this is the step's only
        update. Statistics of samples do not need it, because a sample is whole in one micro-batch."""
        return self.first_pass or self.logp_old_in_prepare or self.logp_old_in_credit

    @classmethod
    def of(cls, cfg: AlgorithmConfig) -> Needs:
        """What the policy's objective needs."""
        selects = cfg.loss.chooses_tokens
        weight = cfg.correction.weight if cfg.correction else None
        return cls(
            logp_old=not cfg.is_around_engine or cfg.kl_in_reward,
            logp_ref=cfg.kl is not None,
            entropy=True,
            first_pass=selects or cfg.top_entropy_share < 1,
            logp_old_in_prepare=selects or (weight is not None and weight.normalise),
            token_advantages=cfg.is_per_token,
            logp_old_in_credit=cfg.kl_in_reward,
        )

    def begins_with_pass(self, num_updates: int) -> bool:
        """Whether a step with this number of updates begins with a forward pass of the policy over all its samples."""
        return self.logp_old and (num_updates > 1 or self.before_update)

    def num_passes(self, num_updates: int) -> float:
        """The forward passes of a step in addition to its updates'; a pass over all samples counts 1."""
        passes = float(self.logp_ref) + self.begins_with_pass(num_updates)
        if self.first_pass:  # of each mini-batch; the pass at the beginning of a step serves the first one
            passes += (num_updates - self.logp_old) / num_updates
        return passes
