"""A private machine for each answer: a shell and a tree of files that nobody else sees."""

from __future__ import annotations

from megatron_rl.environments.sandbox.box import Box, BoxError, Limits, Ran

__all__ = ["Box", "BoxError", "Limits", "Ran"]
