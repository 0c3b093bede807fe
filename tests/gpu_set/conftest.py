"""`make test-gpu-set`: what the GPU packages do on a machine without a GPU. Elsewhere these tests are skipped."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items):
    if find_spec("transformer_engine") is None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="the GPU packages are not installed: make gpu-env"))
