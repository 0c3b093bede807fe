"""A step is a list of passes over tokens: which model computes what, over which samples, and what column it leaves.

An objective says which columns it takes, and when (`Needs`). From this and the number of updates follows the list, in
its order. The actor carries it out, and a dry run counts it; so this imports no torch.

Example: PPO's clip with a KL penalty in the loss, two mini-batches and one epoch:

    reference  log-probs   all samples    leaves logp_ref
    policy     log-probs   all samples    leaves logp_old
    policy     gradient    update 0
    policy     gradient    update 1

With one update the second line is left out, unless `credit` or `statistics` needs it: the update computes the same
log-probs, and its loss detaches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from megatron_rl.config.algorithm import AlgorithmConfig

Column = Literal[
    "logp",
    "logp_old",
    "logp_ref",
    "support",
    "logp_teacher",
    "entropy",
    "energy",
    "value",
    "return",
    "reward",
    "advantage",
]
"""A number at each token. `logp` and `entropy` are under the weights that an update begins with, `logp_old` and `value`
under the weights at the step's start, `logp_ref` under the reference policy's, `logp_teacher` under a teacher's.
`support` has the policy's or the teacher's most probable tokens, K at each token; `logp_teacher` is then theirs. The
pass that leaves `logp_old` leaves `energy` (`GroupedColumns`), too."""

STOPPED = "stopped"
"""The metric of an update that was not made, because `Objective.stops` was true."""
REPEATED = "update_repeated"
"""The metric of a model in float16 that says how often the gradient of an update was computed again, because it
overflowed."""


class Pass(NamedTuple):
    """A pass of a model over tokens of a step."""

    model: Literal["policy", "reference", "teacher", "critic"]
    computes: Literal["log-probs", "values", "gradient"]
    leaves: Column | None = None
    """The column that later passes find; None if only the update that follows needs the numbers."""
    update: int | None = None
    """The optimizer step whose mini-batch it is over; None: all samples of the step."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The columns that an objective takes."""

    credit: frozenset[Column] = frozenset()
    """The columns for the advantages of single tokens, when the step begins. Empty: each sample has one advantage."""
    statistics: frozenset[Column] = frozenset()
    """The columns for numbers of a whole mini-batch, before its update. Statistics of samples need none, because a
    sample is whole in one micro-batch."""
    loss: frozenset[Column] = frozenset()
    """The columns for the loss of a token."""
    teacher: Literal["sampled", "teacher", "student"] | None = None
    """The tokens whose log-probs the teacher on the policy's ranks computes: the sampled ones, its own most probable
    ones, or the policy's. None: there is no such teacher, and `logp_teacher` comes with the tokens."""

    @classmethod
    def of(cls, cfg: AlgorithmConfig) -> Needs:
        """What the policy's objective takes."""
        selects = cfg.loss.chooses_tokens
        weight = cfg.correction.weight if cfg.correction else None
        normalises = weight is not None and weight.normalise
        has_energy = "energy" in cfg.adv_estimator.needs
        return cls(
            credit=_columns(
                reward=cfg.is_per_token,
                value="values" in cfg.adv_estimator.needs,
                logp_old=cfg.kl_in_reward or has_energy,
                logp_ref=cfg.kl_in_reward,
                energy=has_energy,
            ),
            statistics=_columns(
                logp=selects or cfg.top_entropy_share < 1,
                entropy=cfg.top_entropy_share < 1,
                logp_old=selects or normalises,
            ),
            loss=_columns(
                entropy=True,
                logp_ref=cfg.loss.needs_reference or (cfg.kl is not None and not cfg.kl_in_reward),
                logp_old=not cfg.is_around_engine,
                logp_teacher=cfg.distillation is not None,
            ),
            teacher=None if cfg.distillation is None else cfg.distillation.on_ranks,
        )

    @property
    def kept(self) -> list[Column]:
        """The columns that a step computes once and that later epochs take."""
        once: list[Column] = ["logp_old", "logp_ref"]
        kept = [column for column in once if column in self.statistics | self.loss]
        kept += ["logp_teacher"] if self.teacher else []
        kept += ["support"] if self.teacher in ("teacher", "student") else []
        return [*kept, "advantage"] if self.credit else kept

    @property
    def is_before_update(self) -> bool:
        """Whether something needs a forward pass of the policy before an update, even if the step has only one."""
        return bool(self.statistics) or "logp_old" in self.credit

    def __contains__(self, column: Column) -> bool:
        return column in self.credit | self.statistics | self.loss

    def passes(self, num_updates: int) -> list[Pass]:
        """The passes of a step with this number of updates."""
        passes = []
        if "value" in self:
            passes.append(Pass("critic", "values", "value"))
        if "logp_ref" in self:
            passes.append(Pass("reference", "log-probs", "logp_ref"))
        begins_with_pass = "logp_old" in self and (num_updates > 1 or self.is_before_update)
        if begins_with_pass:
            passes.append(Pass("policy", "log-probs", "logp_old"))
        if self.teacher == "student":
            passes.append(Pass("policy", "log-probs", "support"))
        if self.teacher:
            passes.append(Pass("teacher", "log-probs", "logp_teacher"))
        for update in range(num_updates):
            # The first update begins with the weights of logp_old, whose pass has computed what its statistics take.
            if "logp" in self.statistics and not (update == 0 and begins_with_pass):
                passes.append(Pass("policy", "log-probs", update=update))
            passes.append(Pass("policy", "gradient", update=update))
        return passes


def _columns(**taken: bool) -> frozenset[Column]:
    return frozenset(cast(Column, name) for name, is_taken in taken.items() if is_taken)


def num_forward_passes(passes: Sequence[Pass], updates_per_epoch: int) -> float:
    """The forward passes of the policy's ranks in addition to their updates'; a pass over all samples counts 1."""
    own = [one for one in passes if one.computes == "log-probs"]
    return sum(1.0 if one.update is None else 1 / updates_per_epoch for one in own)
