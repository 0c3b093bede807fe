"""TRL's `environment_factory`: objects whose public methods are tools (`rollout.environment.objects`).

Invariants (tests/doors): rows without a prompt get an empty one, which `reset` completes; a row that names no
environment is refused before a run begins; a class with `get_reward` is a reward of its own, with the weight 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.environment import CHOOSES
from megatron_rl.environments import Kind, kind_from
from megatron_rl.trl.step_sizes import StepSizes

NO_PROMPT = [{"role": "user", "content": ""}]


class GivenEnvironments:
    """
    Args:
        given: a callable that makes an object, or a mapping of names to several; None: there are none.
        tools: functions that all rows offer.

    Raises:
        ValueError: an object cannot be made, or has no method `reset`, or one that cannot be a tool.
    """

    def __init__(self, given: Any, tools: Any) -> None:
        self.functions = list(tools or ())
        self._given = dict(given) if isinstance(given, Mapping) else given
        named = self._given if isinstance(self._given, dict) else {} if given is None else {None: given}
        self._kinds: dict[str | None, Kind] = {
            name: kind_from(make, "environment_factory" + (f"[{name!r}]" if name else ""))
            for name, make in named.items()
        }

    def __bool__(self) -> bool:
        return bool(self._kinds or self.functions)

    @property
    def open_prompts(self) -> bool:
        """Whether objects may append to prompts."""
        return bool(self._kinds)

    @property
    def tools(self) -> list[Any]:
        """What the prompts offer, of all environments together: functions and schemas."""
        return [*self.functions, *(tool.schema for kind in self._kinds.values() for tool in kind.tools.values())]

    @property
    def rewards(self) -> list[dict[str, Any]]:
        """The entries of the section `rewards`."""
        names = dict.fromkeys(kind.type_name for kind in self._kinds.values() if kind.owns_reward)
        return [{"kind": "environment", "name": "_".join(names)}] if names else []

    def section(self, args: Any) -> dict[str, Any]:
        """The section `rollout.environment`. TRL bounds neither turns nor results but by `max_completion_length`."""
        turns, most = args.max_tool_calling_iterations, args.max_completion_length
        return {
            "kind": "tools",
            "paths": self.functions,
            "objects": self._given,
            "max_turns": most if turns is None else turns + 1,
            "max_observation_tokens": most,
            "ends_at_malformed_calls": True,
        }

    def rows(self, given: Any, args: Any) -> Any:
        """The training rows.

        Args:
            given: the script's; None means that `reset` gives the prompts.

        Raises:
            ValueError: there must be some, or `max_steps`; or they are several data sets.
        """
        if given is None:
            if not self._kinds:
                raise ValueError("train_dataset is missing; give rows with `prompt`")
            if None not in self._kinds:
                raise ValueError(
                    "a mapping as environment_factory requires a train_dataset, whose column `environment` names one "
                    "of its entries"
                )
            if args.max_steps <= 0:
                raise ValueError("without train_dataset the length of the training is max_steps; give it")
            return [{"prompt": NO_PROMPT} for _ in range(StepSizes.of(args).prompts)]
        if isinstance(given, Mapping):
            sets = ", ".join(map(str, given))
            raise ValueError(f"train_dataset is a {type(given).__name__} of {sets}; give one of them")
        return given

    def complete(self, rows: Any) -> Any:
        """The rows with prompts.

        Raises:
            ValueError: a row names no environment.
        """
        if rows is None or not self._kinds:
            return rows
        for index, row in enumerate(rows):
            if None not in self._kinds and row.get(CHOOSES) not in self._kinds:
                raise ValueError(
                    f"row {index} has environment={row.get(CHOOSES)!r}, which is not among the environments of "
                    f"environment_factory: {', '.join(map(str, self._kinds))}"
                )
        return [{"prompt": NO_PROMPT, **row} for row in rows]
