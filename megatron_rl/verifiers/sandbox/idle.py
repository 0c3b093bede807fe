"""Runs tests without a program, inside the sandbox: what passes then can hardly judge one. Only the standard library is
used, as in script.py."""

from __future__ import annotations

import json
import os

from megatron_rl.verifiers.sandbox.program_tests import passes_with
from megatron_rl.verifiers.sandbox.script import compiled

TYPE_CHECKING = False  # the module typing needs 5 ms for its import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

RESULTS: dict[str, Callable[[], Any]] = {"None": lambda: None, "[]": list, "NaN": lambda: float("nan")}


def run_idle(rows: str, results: int) -> None:
    """For each row, write one line of JSON: the first of RESULTS that lets all tests pass if every function and
    every method that they call returns it, or null.

    Args:
        rows: lists of Python texts, as JSON.
        results: the number of the pipe for the lines.
    """
    with os.fdopen(results, "w") as report:
        for tests in json.loads(rows):
            passed = (name for name in RESULTS if all(passes(test, name) for test in tests))
            print(json.dumps(next(passed, None)), file=report, flush=True)


def passes(test: str, result: str) -> bool:
    def idle(*_: Any, **__: Any) -> Any:
        return RESULTS[result]()

    class Idle:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __getattr__(self, _: str) -> Any:
            return idle

    return passes_with(
        compiled(test, "test"), lambda name: Idle if name[0].isupper() and name != name.upper() else idle
    )
