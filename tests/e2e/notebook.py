"""Runs the cells of a notebook as a kernel does, without Jupyter: `python notebook.py FILE.ipynb`.

The cells are the module `__main__`, `sys.stdout` is an object without a file, the value of the last line of a cell is
displayed, and the environment asks for colours. Prints what each cell of code has shown, a list of JSON on the last
line.
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {"TERM": "xterm-color", "CLICOLOR": "1", "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}
"""The variables that ipykernel sets (7.4)."""


class Screen(io.TextIOBase):
    """What a kernel has in the place of `sys.stdout`: it has no file descriptor."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """The value of the last line, if it is an expression."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec", dont_inherit=True), names)
    return None if last is None else eval(compile(last, "<cell>", "eval", dont_inherit=True), names)


def main(path: Path) -> None:
    os.environ.update(ENVIRONMENT)
    names = {name: value for name, value in vars(sys.modules["__main__"]).items() if name.startswith("__")}
    shown = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        sys.stdout = screen = Screen()
        try:
            value = run_cell("".join(cell["source"]), names)
        finally:
            sys.stdout = sys.__stdout__
            print(screen.text, end="")
        picture = value._repr_png_() if hasattr(value, "_repr_png_") else None
        shown.append({"text": screen.text, "value": repr(value), "png": len(picture or b"")})
    print(json.dumps(shown))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
