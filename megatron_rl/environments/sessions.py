"""Makes the environments of answers from the configuration."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_rl.config.environment import EnvironmentConfig, TurnsEnvironment
from megatron_rl.config.function import load_function
from megatron_rl.environments.calls import Calls
from megatron_rl.environments.environment import ClassSession, Session
from megatron_rl.environments.tools import ToolSession, load_tools


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
            self._tools = load_tools(cfg.paths)
            return
        self._class: Any = load_function(cfg.path)
        missing = [name for name in ("reset", "step") if not callable(getattr(self._class, name, None))]
        if not inspect.isclass(self._class) or missing:
            raise ValueError(f"rollout.environment.path: {cfg.path} must be a class with methods reset and step")

    def new(self) -> Session:
        """The environment of another answer."""
        if self._cfg.kind == "tools":
            return ToolSession(self._tools, self._delimiter, self._calls)
        return ClassSession(self._class, self._cfg, self._calls)


def schemas_of(cfg: EnvironmentConfig | None) -> list[dict[str, Any]]:
    """The JSON schemas of the tools that the chat template offers; empty if there are none.

    Raises:
        ValueError: a tool cannot be imported or offered.
    """
    if cfg is None or cfg.kind != "tools":
        return []
    return [dict(tool.schema) for tool in load_tools(cfg.paths).values()]
