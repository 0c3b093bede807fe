from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from leaks import lasting


@pytest.fixture(autouse=True)
def variables_of_ray() -> Iterator[None]:
    """What Ray and `ray_session` set stays in their process: Ray reads its token once in a process, so a later Ray must
    find the same one."""
    yield
    stays = {name: value for name, value in os.environ.items() if name.startswith("RAY_") or name == "PYTHONBREAKPOINT"}
    for name in stays:
        del os.environ[name]
    with lasting():
        os.environ.update(stays)
