from __future__ import annotations

import pytest

from megatron_rl.bridge import join


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    """A process has one device for all its groups, and keeps it."""
    join._gloo_device()
