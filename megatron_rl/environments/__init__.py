"""What answers to the turns of a model: environments and tools, and how their observations become tokens."""

from __future__ import annotations

from megatron_rl.environments.asked_calls import Render, as_turn, calls_of, format_of
from megatron_rl.environments.call_formats import FORMATS, CallFormat
from megatron_rl.environments.call_reader import Schemas
from megatron_rl.environments.environment import (
    Closing,
    EnvironmentFault,
    EnvironmentTimeout,
    Reaction,
    Session,
    Step,
    fault_of_reward,
)
from megatron_rl.environments.objects import Kind, kind_from
from megatron_rl.environments.observations import ChangedHistory, Continuation, Observations, require_offered
from megatron_rl.environments.sessions import Sessions, kinds_of_objects, object_columns, schemas_of

__all__ = [
    "FORMATS",
    "CallFormat",
    "ChangedHistory",
    "Continuation",
    "EnvironmentFault",
    "EnvironmentTimeout",
    "Kind",
    "Observations",
    "Closing",
    "Reaction",
    "Render",
    "Schemas",
    "Session",
    "Sessions",
    "Step",
    "as_turn",
    "calls_of",
    "fault_of_reward",
    "format_of",
    "kind_from",
    "kinds_of_objects",
    "object_columns",
    "require_offered",
    "schemas_of",
]
