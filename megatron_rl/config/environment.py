"""What responds to a model's turns: an environment of the user's own, or tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.function import FunctionPath
from megatron_rl.config.section import Section

CHOOSES = "environment"
"""The column of the rows that names one of several kinds of objects."""


@dataclass(frozen=True, slots=True)
class ObjectColumns:
    """What the objects of `ToolsEnvironment.objects` need of a row."""

    wanted: Mapping[str | None, tuple[str, ...]]
    """The arguments of `reset` without a default, by the names of the kinds; None if there is only one kind."""

    def check(self, columns: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: an object could not begin an answer to a row with these columns.
        """
        name = None if None in self.wanted else columns.get(CHOOSES)
        if not isinstance(name, str | None) or name not in self.wanted:
            said = f"column `{CHOOSES}` is {name!r}" if CHOOSES in columns else f"column `{CHOOSES}` is missing"
            raise ValueError(
                f"{said}; it must name one of rollout.environment.objects, which are {', '.join(map(str, self.wanted))}"
            )
        offered = {"prompt", *columns} - ({CHOOSES} if name is not None else set())
        if missing := [one for one in self.wanted[name] if one not in offered]:
            of_kind = f" {name!r}" if name is not None else ""
            raise ValueError(
                f"reset of rollout.environment.objects{of_kind} asks for {missing[0]!r}, but it gets the row's columns "
                f"{sorted(offered)}; rename one of the two, or give the argument a default"
            )


History = Literal["split", "refuse"]


class _Failures(Section):
    """What happens when an environment fails, so that nothing can be said about an answer."""

    retries: NonNegativeInt = 1
    """The number of times that an answer begins again after its environment has failed, in another process if
    `processes` are several. After that it has no reward."""
    max_failed: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The share of a step's answers whose environment has failed above which the run ends, with the most frequent
    cause."""
    timeout_reward: float | None = None
    """The reward `environment` of an answer whose environment, or agent, exceeded its time limit. null: this is a
    failure, and the answer has no reward."""


class _Turns(_Failures):
    """The limits of an answer of several turns. All its tokens, observations included, share
    `rollout.max_response_tokens`."""

    max_turns: PositiveInt = 8
    """The largest number of model turns in an answer. An answer that would need another turn is cut."""
    turn_tokens: PositiveInt | None = None
    """The largest number of sampled tokens in a turn; a longer turn is cut and ends the answer. null means the rest of
    `rollout.max_response_tokens`."""
    thought_tokens: PositiveInt | None = None
    """The largest number of sampled reasoning tokens in all turns of an answer, besides the budget of each turn, which
    is `rollout.thinking`. null means no limit."""
    answer_timeout_s: PositiveFloat | None = None
    """The time, in seconds, after which no other turn begins, so that the answer is cut. null means no limit."""
    max_observation_tokens: PositiveInt = 1024
    """The largest number of tokens of an observation. A longer one is cut and marked as cut."""
    step_timeout_s: PositiveFloat = 60
    """The longest time, in seconds, that a call of a tool, or of a method of an environment, may take."""
    history: History = "split"
    """What happens if the chat template changes earlier turns, as most do that remove reasoning. `split`: the answer
    has several conversations, each a sample with the history that the template writes. `refuse`: the run does not
    start."""
    processes: NonNegativeInt = 0
    """The number of extra processes per engine that run environments or tools. 0: they run in the engine's process, as
    coroutines and in threads. This suits environments that mostly wait; heavy Python computation would slow the engine
    down."""
    spread: bool = False
    """Whether these processes run on all nodes of Ray's cluster in turn, also on nodes without GPUs, and not on their
    engine's."""

    def conflicts(self, run: Any) -> Iterator[str]:
        if self.spread and not self.processes:
            yield "rollout.environment.spread is for extra processes; set rollout.environment.processes"
        if self.thought_tokens is not None and run.rollout.thinking is None:
            yield (
                "rollout.environment.thought_tokens is a budget for the reasoning of all turns, which rollout.thinking "
                "keeps; set rollout.thinking with the budget of a turn"
            )


class ClassEnvironment(_Turns):
    """A user's class with `reset(row)` and `step(text)`. Every answer gets its own instance."""

    kind: Literal["class"] = "class"
    path: FunctionPath
    """The place of the class: `package.module:Class`, or `folder/file.py:Class`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""


CallFormatName = Literal[
    "hermes", "qwen3_coder", "glm", "minimax_m2", "kimi_k2", "deepseek", "gpt_oss", "llama3", "mistral", "nemotron"
]
"""How a model writes calls of tools (`environments.call_formats`)."""


class ToolsEnvironment(_Turns):
    """Functions that the chat template describes to the model, and that the model's turns call. A turn without a call
    ends the answer."""

    kind: Literal["tools"] = "tools"
    paths: tuple[FunctionPath, ...] = ()
    """The places of the functions: `package.module:function`, or `folder/file.py:function`. Each needs type hints for
    all arguments, and a docstring that describes the function and, under `Args:`, each argument. It may be
    asynchronous."""
    objects: FunctionPath | dict[str, FunctionPath] | None = None
    """The place of a class. Every answer gets its own object: the public methods are tools; `reset` gets the row's
    columns that it names, and may return a text for the last turn of the prompt; `get_reward`, if there is one, gives
    the reward `environment`. Of several classes, by names, the row's column `environment` chooses one."""
    format: CallFormatName | None = None
    """How calls are written. null means the format of the chat template."""
    ends_at_malformed_calls: bool = False
    """Whether a turn with a call that cannot be read calls nothing and ends the answer. If not, the model reads what is
    wrong, and may try again."""

    @property
    def object_paths(self) -> tuple[str, ...]:
        if isinstance(self.objects, dict):
            return tuple(self.objects.values())
        return () if self.objects is None else (self.objects,)

    @model_validator(mode="after")
    def _has_tools(self) -> Self:
        if not self.paths and not self.objects:
            raise ValueError("paths is empty; name a function that the model may call, or objects whose methods it may")
        return self


class AgentEnvironment(_Failures):
    """An external agent, which calls the model through an OpenAI-compatible URL. It is a function of the row and of
    this URL. It runs once for each answer, on the engine's node, and returns the reward, or None if other rewards
    (`rewards`) judge. Sampling always follows `rollout.sampling`; the agent cannot change it."""

    kind: Literal["agent"] = "agent"
    path: FunctionPath
    """The place of the function: `package.module:function`, or `folder/file.py:function`. It is called with the columns
    of the row, without its question, and the `base_url`. It may be asynchronous; otherwise it runs in a thread."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
    format: CallFormatName | None = None
    """How the model writes calls of tools, which the agent gets as `tool_calls`. null means the format of the chat
    template."""
    history: History = "split"
    """What happens if the chat template changes earlier turns, as most do that remove reasoning. `split`: the call
    begins another conversation, a sample with the history that the template writes. `refuse`: it gets an error."""
    timeout_s: PositiveFloat = 600
    """The longest time, in seconds, that one run of the agent may take."""
    remote: bool = False
    """Whether programs on other machines call the model, such as a harness in a container. The `base_url`, with 128
    random bits for each answer, is then the key to a server on all network interfaces."""


TurnsEnvironment = ClassEnvironment | ToolsEnvironment
"""What responds to turns that the engine generates."""
EnvironmentConfig = Annotated[TurnsEnvironment | AgentEnvironment, Field(discriminator="kind")]
