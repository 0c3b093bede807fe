"""How answers are rewarded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_rl.config.section import Section


class _Reward(Section):
    name: str | None = None
    """The reward's name in metrics and logs, which must be unique; null means the reward's kind, or the name of its
    function."""
    weight: float = 1.0
    """The factor of this reward's score in the sum of all rewards."""
    datasets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """The rows that this reward scores, by their column `dataset`; null means all rows. It abstains on other rows. If a
    row has equally long lists in `dataset` and `ground_truth`, the reward takes its own entries of the second one."""
    on_error: Literal["abstain", "stop"] = "abstain"
    """What happens when this reward cannot score an answer (an exception, a NaN, a result of the wrong form, a
    time-out). `abstain` leaves the reward out of the answer's sum, counts the failure, and writes the row and the error
    to `logs/rewards.log`. `stop` ends the run after a checkpoint."""
    timeout_s: PositiveFloat = 600
    """The longest time, in seconds, that scoring the answers of one step may take. After that the verifier's process is
    replaced, or an asynchronous function is cancelled, and `on_error` decides about the answers."""
    max_silent_steps: PositiveInt | None = 3
    """The run stops when this reward has scored no answer at all in this number of steps in a row; null means never.
    Steps without a row that it scores are not counted."""

    def scores(self, columns: Mapping[str, Any]) -> bool:
        """Whether the reward scores the answers to a row with these columns."""
        return self.datasets is None or any(name in self.datasets for name in datasets_of(columns))

    def ground_truth(self, columns: Mapping[str, Any]) -> Any:
        """What the reward compares the answers to a row with; None if the row has no ground truth for it."""
        truth, names = columns.get("ground_truth"), columns.get("dataset")
        if not isinstance(names, list | tuple) or not isinstance(truth, list | tuple) or len(names) != len(truth):
            return truth
        own = [one for one, name in zip(truth, names) if self.datasets is None or name in self.datasets]
        return own[0] if len(own) == 1 else own or None


def datasets_of(columns: Mapping[str, Any]) -> list[str]:
    """The data sets of a row with these columns: its `dataset`, which is a name or a list of names."""
    value = columns.get("dataset")
    names = value if isinstance(value, list | tuple) else [value]
    return list(dict.fromkeys(str(name) for name in names if name is not None))


class GroundTruthReward(_Reward):
    """A reward that compares the text after the thought with the row's `ground_truth`."""

    kind: str
    require_stop: bool = True
    """true: an answer that a token budget cut scores 0. false: it is compared like any other answer."""

    @property
    def label(self) -> str:
        return self.name or self.kind


class ExactAnswerReward(GroundTruthReward):
    """The score is 1 if the text after the thought equals the row's `ground_truth`, else 0."""

    kind: Literal["exact_answer"] = "exact_answer"
    answer: Literal["all", "last_number"] = "all"
    """What is compared. `all` is the whole text after the delimiter, without white space at its ends. `last_number` is
    the last number of that text, compared as a number."""


class JudgedReward(GroundTruthReward):
    """A reward whose verdicts take long, and that judges each answer in a process that can be ended
    (`cluster.verifier_workers`)."""

    answer_timeout_s: PositiveFloat = 10
    """The longest time, in seconds, that the verdict on one answer may take. After that its process is replaced, and
    `on_error` decides about the answer."""


class MathematicsReward(JudgedReward):
    """The score is 1 if the final answer of the text is mathematically equivalent to the row's `ground_truth`, or to
    one of its texts if it is a list, else 0."""

    kind: Literal["mathematics"] = "mathematics"
    mode: Literal["strict", "lenient"] = "strict"
    """What is a final answer. `strict`: the last `\\boxed{...}`, or what follows the last `####`, or the last "answer
    is". `lenient`: without these, the last formula or number."""


class CodeReward(JudgedReward):
    """The last fenced block of the text is a Python program, which runs in a sandbox. `ground_truth` is a list of
    tests: Python texts with asserts, or mappings with the `input` and `output` of the program."""

    kind: Literal["code"] = "code"
    answer_timeout_s: PositiveFloat = 180
    """The longest time, in seconds, that all tests of one answer may take; see `cpu_s` for that of a program. After
    that its process is replaced, and `on_error` decides about the answer."""
    score: Literal["share", "all"] | Annotated[float, Field(gt=0, le=1)] = "all"
    """`share`: the share of the tests that pass. `all`: 1 if all pass, else 0. A number: 1 if at least this share
    passes, else 0."""
    cpu_s: PositiveInt = 10
    """The seconds of a processor that a program may use for its tests."""
    memory_mib: PositiveInt = 1024
    """The memory of a program."""


class InstructionsReward(JudgedReward):
    """The row has verifiable instructions, as IFEval and IF-RLVR have them: `ground_truth` has `instruction_id`, a list
    of kinds, and `kwargs`, the arguments of each."""

    kind: Literal["instructions"] = "instructions"
    score: Literal["share", "all"] = "share"
    """`share`: the share of the instructions that are followed. `all`: 1 if all are followed, else 0."""


class ImportedReward(_Reward):
    """A reward that is Python code of the user's own."""

    given: ClassVar[tuple[str, ...]]
    """The names of the arguments with which every call is made."""
    kind: str
    path: str
    """Where the function is: `package.module:function`, or `folder/file.py:function`. It may also be an object that can
    be called, or a class of such objects, of which one is made in each verifier's process."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments of every call, or of the class. In a call they replace arguments of the same name."""

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(":")[2]

    def absolute(self) -> Self:
        file, colon, name = self.path.rpartition(":")
        path = f"{Path(file).absolute()}{colon}{name}" if file.endswith(".py") else self.path
        return super().absolute().model_copy(update={"path": path})


class FunctionReward(ImportedReward):
    """A function with TRL's signature, which scores all answers in one call: f(prompts, completions, completion_ids,
    trainer_state, log_metric, log_extra, **columns) -> list[float | None]. It may be asynchronous."""

    given = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
    kind: Literal["function"] = "function"


class ComputeScoreReward(ImportedReward):
    """A function with verl's signature, which scores one answer in a call: f(data_source, solution_str, ground_truth,
    extra_info) -> a number, or a mapping with `score`. It may be asynchronous."""

    given = ("data_source", "solution_str", "ground_truth", "extra_info")
    kind: Literal["compute_score"] = "compute_score"

    def ground_truth(self, columns: Mapping[str, Any]) -> Any:
        """The row's `ground_truth`, or that of its `reward_model`, which is where verl's rows have it."""
        nested = columns.get("reward_model")
        if columns.get("ground_truth") is None and isinstance(nested, Mapping):
            return nested.get("ground_truth")
        return super().ground_truth(columns)

    def data_source(self, columns: Mapping[str, Any]) -> Any:
        """The row's `data_source`, or else what it has in `dataset`; None if it has neither."""
        source = columns.get("data_source")
        return columns.get("dataset") if source is None else source


RewardConfig = Annotated[
    ExactAnswerReward | MathematicsReward | CodeReward | InstructionsReward | FunctionReward | ComputeScoreReward,
    Field(discriminator="kind"),
]
