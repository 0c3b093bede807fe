"""No test asserts speed: a busy machine is no fault of the code."""

from __future__ import annotations

import cover
from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every combination where otherwise a pairwise cover runs")


def pytest_configure(config):
    cover.everything = config.getoption("--all")
