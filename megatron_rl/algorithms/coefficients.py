"""The coefficients of KL and entropy, fixed or adaptive, and the bound of the mismatch. Their state is part of the
checkpoint.

Invariant: a controller that was restored from its state gives the same coefficients as one that was never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.config.algorithm import AdaptiveEntropyCoefficient, AdaptiveKlCoefficient, AlgorithmConfig
from megatron_rl.types import Metrics

EXACT_MISMATCH = 1e-3
"""The bound of the mismatch if trainer and engine both compute in float32."""
FIRST_MISMATCH, LATER_MISMATCH, GROWTH = 0.2, 0.02, 4.0
"""These three are for coarser numbers: the bound in the first step, the least bound afterwards, and the later bound
divided by what the first step showed."""


def adapted_kl(coefficient: float, kl: float, num_samples: int, cfg: AdaptiveKlCoefficient) -> float:
    """The next coefficient by the proportional controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2).

    Example: the KL is twice the target, and a step has 1,000 samples of a horizon of 10,000. The error is clipped to
    0.2, and the coefficient is multiplied by 1.02.
    """
    error = min(max(kl / cfg.target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_samples / cfg.horizon)


def adapted_entropy(level: float, entropy: float, cfg: AdaptiveEntropyCoefficient) -> tuple[float, float]:
    """The controller's next level, and the next coefficient, which is the level, or 0 if the entropy is above the
    target (He et al. 2025, arXiv:2505.22312)."""
    level += cfg.delta if entropy < cfg.target else -cfg.delta
    level = min(max(level, 0.0), cfg.maximum)
    return level, level if entropy <= cfg.target else 0.0


@dataclass(slots=True)
class Coefficients:
    """The coefficients `kl` and `entropy` of the current step, and the bound `max_mismatch`; `level` is the state of
    the entropy controller."""

    cfg: AlgorithmConfig
    is_exact: bool = True
    """Whether trainer and engine both compute in float32."""
    kl: float = 0.0
    entropy: float = 0.0
    level: float = 0.0
    max_mismatch: float = 0.0

    def __post_init__(self) -> None:
        self.max_mismatch = self.cfg.max_mismatch or (EXACT_MISMATCH if self.is_exact else FIRST_MISMATCH)
        if self.cfg.kl:
            kl = self.cfg.kl.coefficient
            self.kl = kl.initial if isinstance(kl, AdaptiveKlCoefficient) else kl.value
        if self.cfg.entropy:
            entropy = self.cfg.entropy.coefficient
            self.level = self.entropy = (
                entropy.initial if isinstance(entropy, AdaptiveEntropyCoefficient) else entropy.value
            )

    @property
    def values(self) -> dict[str, float]:
        """The factors of the terms of the loss that are configured, and `max_mismatch`."""
        configured = {"kl": self.cfg.kl, "entropy": self.cfg.entropy, "max_mismatch": True}
        return {name: getattr(self, name) for name, section in configured.items() if section}

    def adapt(self, metrics: Metrics, num_samples: int) -> None:
        """Adapt the coefficients after a step of `num_samples` samples. The metrics `kl`, `entropy` and
        `mismatch/mean_abs` are means over its action tokens."""
        if self._learns_mismatch and self.max_mismatch == FIRST_MISMATCH and "mismatch/mean_abs" in metrics:
            self.max_mismatch = max(LATER_MISMATCH, GROWTH * metrics["mismatch/mean_abs"])
        if self._adaptive_kl:
            self.kl = adapted_kl(self.kl, metrics["kl"], num_samples, self._adaptive_kl)
        if self._adaptive_entropy:
            self.level, self.entropy = adapted_entropy(self.level, metrics["entropy"], self._adaptive_entropy)

    def state(self) -> dict[str, Any]:
        return {"kl": self.kl, "entropy": self.entropy, "level": self.level, "max_mismatch": self.max_mismatch}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the adaptive coefficients. A fixed one keeps the configured value, which a resumed run may change."""
        if self._adaptive_kl:
            self.kl = state["kl"]
        if self._adaptive_entropy:
            self.level, self.entropy = state["level"], state["entropy"]
        if self._learns_mismatch:
            self.max_mismatch = state["max_mismatch"]

    @property
    def _learns_mismatch(self) -> bool:
        return self.cfg.max_mismatch is None and not self.is_exact

    @property
    def _adaptive_kl(self) -> AdaptiveKlCoefficient | None:
        kl = self.cfg.kl and self.cfg.kl.coefficient
        return kl if isinstance(kl, AdaptiveKlCoefficient) else None

    @property
    def _adaptive_entropy(self) -> AdaptiveEntropyCoefficient | None:
        entropy = self.cfg.entropy and self.cfg.entropy.coefficient
        return entropy if isinstance(entropy, AdaptiveEntropyCoefficient) else None
