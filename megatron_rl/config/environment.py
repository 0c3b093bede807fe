"""What answers to a model's turns: an environment of the user's own, or tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.config.function import FunctionPath
from megatron_rl.config.section import Section


class _Turns(Section):
    """The limits of an answer of several turns. All its tokens, those of the observations included, share
    `rollout.max_response_tokens`."""

    max_turns: PositiveInt = 8
    """The largest number of the model's turns in an answer. One that would need another turn is cut."""
    turn_tokens: PositiveInt | None = None
    """The largest number of sampled tokens in a turn; a longer one is cut, and the answer ends with it. null means what
    is left of `rollout.max_response_tokens`."""
    max_observation_tokens: PositiveInt = 1024
    """The largest number of tokens of an observation. A longer one is cut, and says so."""
    step_timeout_s: PositiveFloat = 60
    """The longest time, in seconds, that a call of a tool, or of a method of an environment, may take."""
    processes: NonNegativeInt = 0
    """The number of processes, beside each engine, in which environments or tools run. 0: they run in the engine's
    process, as coroutines and in threads, which is right for those that mostly wait; one that computes much in Python
    would slow the engine down."""


class ClassEnvironment(_Turns):
    """A class of the user's own with `reset(row)` and `step(text)`, of which every answer gets an object."""

    kind: Literal["class"] = "class"
    path: FunctionPath
    """Where the class is: `package.module:Class`, or `folder/file.py:Class`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""


class ToolsEnvironment(_Turns):
    """Functions that the chat template offers to the model, and that a turn of the model calls. A turn without a call
    ends the answer."""

    kind: Literal["tools"] = "tools"
    paths: Annotated[tuple[FunctionPath, ...], Field(min_length=1)]
    """Where the functions are: `package.module:function`, or `folder/file.py:function`. Each has types for all
    arguments, and a docstring that describes it and, under `Args:`, each of them. It may be asynchronous."""


class AgentEnvironment(Section):
    """An agent of somebody else, which asks the model through an OpenAI-compatible address. It is a function of the row
    and of this address, runs once for each answer, on the engine's node, and returns the reward, or None if others
    (`rewards`) judge. Sampling is that of `rollout.sampling`, whatever the agent asks for."""

    kind: Literal["agent"] = "agent"
    path: FunctionPath
    """Where the function is: `package.module:function`, or `folder/file.py:function`. It is called with the columns of
    the row, without its question, and the `base_url`. It may be asynchronous; another one runs in a thread."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
    timeout_s: PositiveFloat = 600
    """The longest time, in seconds, that one run of the agent may take."""


TurnsEnvironment = ClassEnvironment | ToolsEnvironment
"""What answers to turns that the engine asks for."""
EnvironmentConfig = Annotated[TurnsEnvironment | AgentEnvironment, Field(discriminator="kind")]
