"""Runs a program inside the sandbox. Only the standard library is used, because the process is a bare interpreter that
cannot import this package, and little of it, because every import costs each process some milliseconds."""

from __future__ import annotations

import builtins
import sys
from types import CodeType, ModuleType


def run_script(program: str) -> None:
    """Run the program as `python program.py` would: with its standard input and output."""
    exec(compiled(program, "program.py"), module_of("__main__").__dict__)


def compiled(text: str, name: str) -> CodeType:
    """The code of a text, without the effect of this module's __future__ import."""
    code: CodeType = compile(text, name, "exec", dont_inherit=True)
    return code


def module_of(name: str) -> ModuleType:
    """A new module under a name by which dataclasses and pickle can find it."""
    sys.modules[name] = module = ModuleType(name)
    # Python without the module `site`, which the sandbox leaves out, has no `exit` and `quit`.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    return module
