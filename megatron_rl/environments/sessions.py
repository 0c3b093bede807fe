"""Makes the environments of answers from the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.environment import EnvironmentConfig, TurnsEnvironment
from megatron_rl.config.function import load_function
from megatron_rl.environments.calls import Calls
from megatron_rl.environments.environment import ClassSession, Session
from megatron_rl.environments.objects import CHOOSES, AnswerObject, kinds_of
from megatron_rl.environments.tool_session import ToolSession
from megatron_rl.environments.tools import load_tools


class Sessions:
    """
    Args:
        delimiter: the text that ends a thought; empty if the model does not think.

    Raises:
        ValueError: the class or a function cannot be imported, or has not what it needs.
    """

    def __init__(self, cfg: TurnsEnvironment, delimiter: str) -> None:
        self._cfg, self._delimiter, self._calls = cfg, delimiter, Calls(cfg.step_timeout_s)
        if cfg.kind == "tools":
            self._tools, self._kinds = load_tools(cfg.paths), kinds_of(cfg.objects)
            if twice := [name for kind in self._kinds.values() for name in kind.tools if name in self._tools]:
                raise ValueError(f"rollout.environment: two tools are named {twice[0]!r}; rename one")
            return
        self._class: Any = load_function(cfg.path)
        missing = [name for name in ("reset", "step") if not callable(getattr(self._class, name, None))]
        if not inspect.isclass(self._class) or missing:
            raise ValueError(f"rollout.environment.path: {cfg.path} must be a class with methods reset and step")

    def new(self) -> Session:
        """The environment of another answer."""
        if self._cfg.kind == "tools":
            own = AnswerObject(self._kinds, self._calls) if self._kinds else None
            return ToolSession(self._cfg, self._tools, own, self._delimiter, self._calls)
        return ClassSession(self._class, self._cfg, self._calls)


def schemas_of(cfg: EnvironmentConfig | None, row: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The JSON schemas of the tools that the chat template offers; empty if there are none.

    Args:
        row: the columns of a row, which choose one of several kinds of objects; None means all of them.

    Raises:
        ValueError: a tool cannot be imported or offered.
    """
    if cfg is None or cfg.kind != "tools":
        return []
    tools = load_tools(cfg.paths)
    for name, kind in kinds_of(cfg.objects).items():
        if name is None or row is None or row.get(CHOOSES) == name:
            tools |= kind.tools
    return [dict(tool.schema) for tool in tools.values()]
