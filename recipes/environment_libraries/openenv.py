"""Environments of OpenEnv, which are servers: each answer has a session of its own over a websocket.

    environment: {kind: class, path: "megatron_rl.recipes.environment_libraries.openenv:OpenEnv",
                  arguments: {url: "http://games:8000", action: message, observation: text, reset: {seed: seed}}}

The messages follow openenv-core 0.3.0 and openenv 0.4.1 and 0.10.0. `{"type": "reset", "data": {...}}` and
`{"type": "step", "data": <action>}` are answered by `{"type": "error", "data": {"message": ..., "code": ...}}` or
`{"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from megatron_rl.environments.environment import Step

MAX_MESSAGE_BYTES = 100 << 20


class OpenEnv:
    """
    Args:
        url: the server's address, which begins with `http://`, `https://`, `ws://` or `wss://`.
        action: the field of the action that gets the model's text.
        fixed: other fields of every action.
        observation: the field of the observation that the model reads; null: it reads the whole observation as JSON.
        reset: the arguments of the environment's own reset, and the columns of the row that give them. What it observes
            is not shown, because the first observation is the row's prompt.

    Raises:
        ValueError: the address is none of these.

    A server that cannot be reached, or that answers with an error, is a fault of the environment: nothing is said about
    the answer. An environment that wants to score texts which are no action must do so itself.
    """

    def __init__(
        self,
        url: str,
        action: str = "message",
        fixed: Mapping[str, Any] | None = None,
        observation: str | None = None,
        reset: Mapping[str, str] | None = None,
    ) -> None:
        scheme, _, rest = url.rstrip("/").partition("://")
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if scheme not in schemes or not rest:
            raise ValueError(f"url {url!r} must begin with http://, https://, ws:// or wss://, and name a host")
        self._url = f"{schemes[scheme]}://{rest}/ws"
        self._action, self._fixed, self._observation, self._reset = action, fixed or {}, observation, reset or {}
        self._line: ClientConnection | None = None

    async def reset(self, row: Mapping[str, Any]) -> None:
        missing = [column for column in self._reset.values() if column not in row]
        if missing:
            raise RuntimeError(f"the row has no column {missing[0]!r}, which `reset` names; it has {sorted(row)}")
        self._line = await connect(self._url, max_size=MAX_MESSAGE_BYTES)
        await self._ask("reset", {name: row[column] for name, column in self._reset.items()})

    async def step(self, text: str) -> Step:
        given = await self._ask("step", {**self._fixed, self._action: text})
        observed = given.get("observation")
        if self._observation is not None:
            if not isinstance(observed, Mapping) or self._observation not in observed:
                raise RuntimeError(f"the observation has no field {self._observation!r}: {observed!r}")
            observed = observed[self._observation]
        shown = observed if isinstance(observed, str) else json.dumps(observed, ensure_ascii=False)
        return Step(shown, given.get("reward"), bool(given.get("done")))

    async def close(self) -> None:
        if self._line is not None:
            await self._line.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._line is not None, "reset comes first"
        with suppress(ConnectionClosed):  # a server without a free session says so, and closes
            await self._line.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._line.recv())
        given = answer.get("data", {})
        if answer.get("type") == "error":
            raise RuntimeError(f"{self._url} answered to {kind}: {json.dumps(given, ensure_ascii=False)}")
        if not isinstance(given, dict) or "observation" not in given:
            raise RuntimeError(f"{self._url} answered to {kind} with no observation: {answer!r}"[:500])
        return given
