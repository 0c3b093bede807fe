"""The verdict over a program, as tests ask for it."""

from __future__ import annotations

from textwrap import dedent

from megatron_rl.types import Verdict
from megatron_rl.verifiers.sandbox.code import verify
from megatron_rl.verifiers.sandbox.process import Limits


def judge(program: str, cases, score="share", **limits) -> Verdict:
    return verify(f"It is\n```python\n{dedent(program)}\n```\n", cases, Limits(**limits), score)
