"""Makes the environments of answers from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.environment import CHOOSES, EnvironmentConfig, ObjectColumns, TurnsEnvironment
from megatron_rl.environments.call_formats import FORMATS
from megatron_rl.environments.calls import Calls
from megatron_rl.environments.environment import ClassSession, Session, class_of
from megatron_rl.environments.objects import AnswerObject, Kind, kinds_of
from megatron_rl.environments.tool_session import ToolSession
from megatron_rl.environments.tools import load_tools


class Sessions:
    """
    Args:
        delimiter: the text that ends a thought; empty if the model does not think.
        form: the format of calls, a name of FORMATS.

    Raises:
        ValueError: see `class_of`, or a function cannot be imported, or has not what it needs.
    """

    def __init__(self, cfg: TurnsEnvironment, delimiter: str, form: str = "hermes") -> None:
        self._cfg, self._delimiter, self._form = cfg, delimiter, FORMATS[form]
        self._calls = Calls(cfg.step_timeout_s)
        if cfg.kind == "tools":
            self._tools = load_tools(cfg.paths)
            self._kinds = kinds_of(cfg, self._tools)
            return
        self._class = class_of(cfg)

    def new(self) -> Session:
        """The environment of another answer."""
        if self._cfg.kind == "tools":
            own = AnswerObject(self._kinds, self._calls) if self._kinds else None
            return ToolSession(self._cfg, self._tools, own, self._form, self._delimiter, self._calls)
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
    for name, kind in kinds_of(cfg, list(tools)).items():
        if name is None or row is None or row.get(CHOOSES) == name:
            tools |= kind.tools
    return [dict(tool.schema) for tool in tools.values()]


def kinds_of_objects(cfg: EnvironmentConfig | None) -> dict[str | None, Kind]:
    """The kinds of objects of an environment; none if it has no objects.

    Raises:
        ValueError: see `kinds_of`.
    """
    return kinds_of(cfg, load_tools(cfg.paths)) if cfg is not None and cfg.kind == "tools" else {}


def object_columns(cfg: EnvironmentConfig | None) -> ObjectColumns | None:
    """What the objects of an environment need of a row; None if there are none.

    Raises:
        ValueError: see `kinds_of`.
    """
    kinds = kinds_of_objects(cfg)
    return ObjectColumns({name: kind.wanted for name, kind in kinds.items()}) if kinds else None
