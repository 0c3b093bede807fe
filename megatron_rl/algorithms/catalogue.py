"""The tables of `megatron-rl algorithms`, which are made from the configuration classes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from pydantic_core import PydanticUndefined

from megatron_rl.config import advantages, algorithm, correction, losses, preferences, shaping
from megatron_rl.config.section import Method
from megatron_rl.config.value_loss import ValueLossConfig


@dataclass(frozen=True, slots=True)
class MethodRow:
    kind: str
    formula: str
    source: str
    defaults: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    key: str
    """The configuration key that makes the choice; empty if no recipe has one."""
    entries: tuple[MethodRow, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def tables() -> list[Table]:
    return [
        Table("Advantage estimators", "algorithm.adv_estimator", _union(advantages.AdvantageConfig)),
        Table("Reward shaping", "algorithm.shaping", _union(shaping.ShapingConfig)),
        Table("Policy losses", "algorithm.loss", _union(losses.LossConfig)),
        Table(
            "Aggregations: the weight of an action token's loss",
            "algorithm.loss_agg_mode",
            tuple(MethodRow(mode, *row) for mode, row in losses.AGGREGATIONS.items()),
        ),
        Table("Importance weights", "algorithm.correction.weight", _union(correction.WeightConfig)),
        Table(
            "Rejection: the statistics that have bounds",
            "algorithm.correction.reject, statistic",
            tuple(MethodRow(name, *row) for name, row in correction.STATISTICS.items()),
        ),
        Table(
            "KL to the reference",
            "algorithm.kl.estimator",
            tuple(MethodRow(name, formula, correction.SCHULMAN) for name, formula in algorithm.KL_ESTIMATORS.items()),
        ),
        Table(
            "Coefficients that adapt",
            "algorithm.kl.coefficient, algorithm.entropy.coefficient",
            (_entry(algorithm.AdaptiveKlCoefficient, "KL"), _entry(algorithm.AdaptiveEntropyCoefficient, "entropy")),
        ),
        Table("Value loss", "", (_entry(ValueLossConfig, "squared, huber"),)),
        Table("Losses of preferences", "dpo.loss", _union(preferences.PreferenceLoss)),
        Table("Loss of reward models", "reward_model.loss", (_entry(preferences.BradleyTerryLoss, "bradley_terry"),)),
    ]


def markdown() -> str:
    parts = []
    for table in tables():
        place = f"`{table.key}`" if table.key else "`critic.loss`"
        parts += [f"### {table.title}", "", place, "", "| kind | formula | source | defaults |", "|---|---|---|---|"]
        for entry in table.entries:
            cells = [f"`{entry.kind}`", entry.formula, entry.source, entry.defaults]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _union(annotation: Any) -> tuple[MethodRow, ...]:
    """The sections of an `Annotated[A | B, Field(discriminator="kind")]`."""
    union, *_ = get_args(annotation)
    return tuple(_entry(section, section.model_fields["kind"].default) for section in get_args(union))


def _entry(section: type[Method], kind: str) -> MethodRow:
    fields = {"aggregation": section.aggregation} if hasattr(section, "aggregation") else {}
    fields |= {name: field.default for name, field in section.model_fields.items() if name != "kind"}
    shown = (f"{name} {_written(default)}" for name, default in fields.items())
    return MethodRow(kind, section.formula, section.source, ", ".join(shown))


def _written(default: Any) -> str:
    """A default value in YAML's notation."""
    if default is PydanticUndefined:
        return "required"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return f"{default:g}" if isinstance(default, int | float) else str(default)
