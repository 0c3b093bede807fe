"""What all kinds of rewards have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_rl.config.section import Section


class Reward(Section):
    """What all kinds of rewards have in common."""

    kind: str
    needs_all_answers: ClassVar[bool] = False
    """Whether the score of an answer may depend on the other answers of the step, which one call then scores."""
    name: str | None = None
    """The reward's name in metrics and logs, which must be unique; null means its kind, or its function's name."""
    weight: float = 1.0
    """The factor of this reward's score in the sum of all rewards."""
    datasets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """The rows that this reward scores, by their column `dataset`; null means all rows. Others have no reward of it. If
    a row has lists of equal length in `dataset` and `ground_truth`, the reward takes its own ground truths."""
    on_error: Literal["abstain", "stop"] = "abstain"
    """What happens when this reward cannot score an answer (an exception, a NaN, a wrong form, a time-out). `abstain`:
    the answer's sum lacks it, the failure is counted, and `logs/rewards.log` has the row and the error. `stop` ends the
    run after a checkpoint."""
    timeout_s: PositiveFloat = 600
    """The longest time of one call, in seconds, which scores the answers that finished since the previous call, or, for
    a `function`, all of a step. Later the verifier's process is replaced, or an asynchronous function is cancelled, and
    `on_error` decides about the answers of the call."""
    max_silent_steps: PositiveInt | None = 3
    """The run stops when this reward has scored no answer at all in this number of steps in a row; null means never.
    Steps without a row that it scores are not counted."""
    max_failed_steps: PositiveInt | None = 3
    """The same for steps when every answer failed (`on_error`)."""

    @property
    def label(self) -> str:
        return self.name or self.kind

    def scores(self, columns: Mapping[str, Any]) -> bool:
        """Whether the reward scores the answers to a row with these columns."""
        return self.datasets is None or any(name in self.datasets for name in datasets_of(columns))

    def ground_truth(self, columns: Mapping[str, Any]) -> Any:
        """What the reward compares the answers to a row with; None if the row has no ground truth for it."""
        truth, names = columns.get("ground_truth"), columns.get("dataset")
        if not isinstance(names, list | tuple) or not isinstance(truth, list | tuple) or len(names) != len(truth):
            return truth
        own = [one for one, name in zip(truth, names, strict=True) if self.datasets is None or name in self.datasets]
        return own[0] if len(own) == 1 else own or None


def datasets_of(columns: Mapping[str, Any]) -> list[str]:
    """The data sets of a row with these columns: its `dataset`, which is a name or a list of names."""
    value = columns.get("dataset")
    names = value if isinstance(value, list | tuple) else [value]
    return list(dict.fromkeys(str(name) for name in names if name is not None and name == name))  # NaN is no name
