"""Sandboxes that were begun ahead end with their test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_rl.environments.sandbox import harbor, workspace
from megatron_rl.environments.sandbox.spares import Spares


@pytest.fixture(autouse=True)
def spares(monkeypatch) -> Iterator[Spares]:
    own = Spares(most=2)
    for module in (harbor, workspace):
        monkeypatch.setattr(module, "SPARES", own)
    yield own
    own.close()
