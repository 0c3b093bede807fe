"""What answers to the turns of a model: environments and tools, and how their observations become tokens."""

from __future__ import annotations

from megatron_rl.environments.environment import Closing, EnvironmentFault, Reaction, Session, Step, fault_of_reward
from megatron_rl.environments.hermes import as_turn, calls_of
from megatron_rl.environments.objects import Kind, kind_from
from megatron_rl.environments.observations import Continuation, Observations, Render, require_offered
from megatron_rl.environments.sessions import Sessions, kinds_of_objects, object_columns, schemas_of
from megatron_rl.environments.tools import asked_form

__all__ = [
    "Continuation",
    "EnvironmentFault",
    "Kind",
    "Observations",
    "Closing",
    "Reaction",
    "Render",
    "Session",
    "Sessions",
    "Step",
    "as_turn",
    "asked_form",
    "calls_of",
    "fault_of_reward",
    "kind_from",
    "kinds_of_objects",
    "object_columns",
    "require_offered",
    "schemas_of",
]
