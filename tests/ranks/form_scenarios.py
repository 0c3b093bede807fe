"""Scenarios of scenarios.py with the families of tests/file_forms.py."""

from __future__ import annotations

import file_forms
import scenarios


def logits(rank, world_size, url, **arguments):
    with file_forms.known():
        return scenarios.logits(rank, world_size, url, **arguments)


def export(rank, world_size, url, **arguments):
    with file_forms.known():
        return scenarios.export(rank, world_size, url, **arguments)


def save_at_once(rank, world_size, url, **arguments):
    with file_forms.known():
        return scenarios.save_at_once(rank, world_size, url, **arguments)
