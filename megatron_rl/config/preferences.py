"""The losses of preferences: what a model learns from answers that somebody likes more, or less, than others.

Each loss states its formula and its source. The symbols: c and r are the chosen and the rejected answer to a prompt,
l is the sum of the log-probs of an answer's tokens, n their number, h = l - l of the reference model, and
s(x) = 1 / (1 + exp(-x)).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from megatron_rl.config.section import Method

NonNegative = Annotated[float, Field(ge=0)]


class PreferenceLossConfig(Method):
    """The base class of the losses of preferences."""

    kind: str
    has_reference: ClassVar[bool] = True
    """Whether the loss compares with a reference model, which is the model that the run begins with."""
    is_mean: ClassVar[bool] = False
    """Whether an answer has the mean of its tokens' log-probs in place of their sum."""
    has_pairs: ClassVar[bool] = True
    """Whether a row has a chosen and a rejected answer. Otherwise it has one, which is liked or not."""
    has_head: ClassVar[bool] = False
    """Whether an answer has the score of a head at its last token in place of log-probs."""


class DpoLoss(PreferenceLossConfig):
    """Direct preference optimisation (Rafailov et al. 2023), with cDPO's label smoothing."""

    formula: ClassVar[str] = "-(1 - e) log s(beta (h_c - h_r)) - e log s(-beta (h_c - h_r)), where e is label_smoothing"
    source: ClassVar[str] = "arXiv:2305.18290 eq. 7"

    kind: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """The larger it is, the nearer the policy stays to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The probability of a pair with exchanged answers."""


class CpoLoss(PreferenceLossConfig):
    """Contrastive preference optimisation (Xu et al. 2024), without a reference."""

    formula: ClassVar[str] = (
        "-(1 - e) log s(beta (l_c - l_r)) - e log s(-beta (l_c - l_r)) - alpha l_c / n_c, where e is label_smoothing"
    )
    source: ClassVar[str] = "arXiv:2401.08417 eq. 3"
    has_reference: ClassVar[bool] = False

    kind: Literal["cpo"] = "cpo"
    beta: PositiveFloat = 0.1
    """The factor of the margin."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The probability of a pair with exchanged answers."""
    alpha: NonNegative = 1.0
    """The weight of the chosen answer's negative log-likelihood, the mean over its tokens."""


class IpoLoss(PreferenceLossConfig):
    """Identity preference optimisation (Azar et al. 2023), with means over tokens, as in TRL."""

    formula: ClassVar[str] = "(h_c / n_c - h_r / n_r - 1 / (2 beta))^2"
    source: ClassVar[str] = "arXiv:2310.12036 eq. 17"
    is_mean: ClassVar[bool] = True

    kind: Literal["ipo"] = "ipo"
    beta: PositiveFloat = 0.1
    """The paper's tau: the best margin is 1 / (2 beta)."""


class SimpoLoss(PreferenceLossConfig):
    """Simple preference optimisation (Meng et al. 2024), without a reference."""

    formula: ClassVar[str] = "-log s(beta (l_c / n_c - l_r / n_r) - gamma) - alpha l_c / n_c"
    source: ClassVar[str] = "arXiv:2405.14734 eq. 6"
    has_reference: ClassVar[bool] = False
    is_mean: ClassVar[bool] = True

    kind: Literal["simpo"] = "simpo"
    beta: PositiveFloat = 2.0
    """The factor of the mean log-probs."""
    gamma: NonNegative = 1.0
    """The margin by which the chosen answer must be ahead."""
    alpha: NonNegative = 0.0
    """The weight of the chosen answer's mean negative log-likelihood, as in CPO; above 0 the loss is CPO-SimPO."""


class OrpoLoss(PreferenceLossConfig):
    """Odds ratio preference optimisation (Hong et al. 2024), without a reference."""

    formula: ClassVar[str] = "-l_c / n_c - beta log s(o_c - o_r), where o = log(p / (1 - p)) and p = exp(l / n)"
    source: ClassVar[str] = "arXiv:2403.07691 eq. 6, 7"
    has_reference: ClassVar[bool] = False
    is_mean: ClassVar[bool] = True

    kind: Literal["orpo"] = "orpo"
    beta: PositiveFloat = 0.1
    """The weight of the odds ratio: the paper's lambda."""


class KtoLoss(PreferenceLossConfig):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024), for answers with a label. z is the mean of h over answers
    to other rows' prompts, which are computed, too, and at least 0."""

    formula: ClassVar[str] = (
        "desirable_weight (1 - s(beta (h - z))) of an answer that is liked, otherwise undesirable_weight (1 - "
        "s(beta (z - h)))"
    )
    source: ClassVar[str] = "arXiv:2402.01306 eq. 7"
    has_pairs: ClassVar[bool] = False

    kind: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    """The larger it is, the nearer the policy stays to the reference."""
    desirable_weight: NonNegative = 1.0
    """The weight of answers that are liked."""
    undesirable_weight: NonNegative = 1.0
    """The weight of the other answers."""


class BradleyTerryLoss(PreferenceLossConfig):
    """The loss of a reward model (Bradley & Terry 1952; Ouyang et al. 2022), where S is the score of an answer and m
    the row's `margin`, 0 without one."""

    formula: ClassVar[str] = "-log s(S_c - S_r - m) + center (S_c + S_r)^2"
    source: ClassVar[str] = "arXiv:2203.02155 eq. 1; center: arXiv:2312.09244 eq. 2"
    has_reference: ClassVar[bool] = False
    has_head: ClassVar[bool] = True

    kind: Literal["bradley_terry"] = "bradley_terry"
    center: NonNegative = 0.0
    """The weight of the square that keeps the scores around 0, such as 0.01; TRL's `center_rewards_coefficient`."""


PreferenceLoss = Annotated[
    DpoLoss | CpoLoss | IpoLoss | SimpoLoss | OrpoLoss | KtoLoss,
    Field(discriminator="kind"),
]
