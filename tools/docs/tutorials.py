"""The tutorials as pages, with the outputs that they have printed.

python -m megatron_rl.tools.docs.tutorials            runs all of them, and writes tutorials/outputs
python -m megatron_rl.tools.docs.tutorials 02 06      these only

A script runs in an empty folder, as a reader runs it. The notebook's cells run in one process, and the outputs of all
cells are one list of JSON.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import time
import tokenize
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tutorials"
OUTPUTS = FOLDER / "outputs"
NOTEBOOK_RUNNER = ROOT / "tests/e2e/notebook.py"
TITLES = {
    "01": "One step by hand",
    "02": "A reward of your own",
    "03": "A loss of your own",
    "04": "An environment of your own",
    "05": "Your own model, in a notebook",
    "06": "Plan a run of 32B",
    "07": "Read a report",
}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
"""What colours text and moves the cursor of a terminal."""


def sources() -> list[Path]:
    return sorted([*FOLDER.glob("0*.py"), *FOLDER.glob("0*.ipynb")])


def output_of(source: Path) -> Path:
    return OUTPUTS / f"{source.name[:2]}.{'json' if source.suffix == '.ipynb' else 'txt'}"


def run(source: Path) -> str:
    """What a tutorial prints in an empty folder.

    Raises:
        RuntimeError: it has failed.
    """
    program = [str(NOTEBOOK_RUNNER), str(source)] if source.suffix == ".ipynb" else [str(source)]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *program], cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{source.name} has failed:\n{done.stdout}\n{done.stderr}")
    printed = CONTROL.sub("", done.stdout)
    for place in (folder, ROOT, sys.prefix):
        printed = printed.replace(f"{place}/", "")
    return printed.splitlines()[-1] + "\n" if source.suffix == ".ipynb" else printed


def page_of(source: Path) -> str:
    """The page of a tutorial, in Markdown."""
    output = output_of(source)
    head = f"# {int(source.name[:2])}. {TITLES[source.name[:2]]}\n\n"
    if source.suffix == ".ipynb":
        return head + _notebook(source, json.loads(output.read_text()))
    where = f"This page is [`tutorials/{source.name}`](../../tutorials/{source.name}), and its output is at the end."
    printed = f"## What it prints\n\n{_fenced(output.read_text(), 'text')}"
    return f"{head}{_script(source.read_text(), where)}\n\n{printed}\n"


def _script(text: str, where: str) -> str:
    """A script: its docstring and its numbered comments are text, and what is between them is code."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    title, _, rest = docstring.partition("\n\n")
    opening = re.sub(r"(?m)^    (python .*)$", r"```bash\n\1\n```", rest)
    lines = text.splitlines()
    steps = _numbered_comments(text)
    starts = [first for first, _ in steps] + [len(lines) + 1]
    body = lines[ast.parse(text).body[0].end_lineno or 0 : starts[0] - 1]
    shown = [f"{title}\n\n{opening}\n\n{where}", _fenced("\n".join(body), "python")]
    for (first, last), end in zip(steps, starts[1:], strict=True):
        words = " ".join(line.lstrip("# ") for line in lines[first - 1 : last])
        number, _, words = words.partition(". ")
        shown += [_titled(number, words), _fenced("\n".join(lines[last : end - 1]), "python")]
    return "\n\n".join(part for part in shown if part)


def _titled(number: str, words: str) -> str:
    """A heading, which is the first sentence if it is short, and the text below."""
    sentence, end, rest = re.match(r"(.*?)([.?])(?: |$)(.*)", words, re.DOTALL).groups()  # type: ignore[union-attr]
    if len(sentence) > 50:
        return f"## Step {number}\n\n{words}"
    return f"## {number}. {sentence}{end.strip('.')}\n\n{rest}"


def _numbered_comments(text: str) -> list[tuple[int, int]]:
    """The first and the last line of each comment at the margin that begins with a number."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline)]
    margin = [token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.start[1] == 0]
    lines, found = text.splitlines(), []
    for line in margin:
        if re.match(r"# \d+\. ", lines[line - 1]):
            last = line
            while last + 1 in margin and not re.match(r"# \d+\. ", lines[last]):
                last += 1
            found.append((line, last))
    return found


def _notebook(source: Path, outputs: list[dict[str, str | int]]) -> str:
    cells = json.loads(source.read_text())["cells"]
    left = iter(outputs)
    parts = [f"This page is [`tutorials/{source.name}`](../../tutorials/{source.name}), with what its cells show."]
    for index, cell in enumerate(cells):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text.partition("\n\n")[2] if index == 0 else text)
            continue
        parts.append(_fenced(text, "python"))
        shown = next(left)
        printed = str(shown["text"]) + ("" if shown["value"] == "None" or shown["png"] else str(shown["value"]))
        if printed.strip():
            parts.append(_fenced(printed, "text"))
        if shown["png"]:
            parts.append("The cell shows a picture with the curves of the run.")
    return "\n\n".join(parts) + "\n"


def _fenced(text: str, language: str) -> str:
    text = text.strip("\n")
    return f"```{language}\n{text}\n```" if text else ""


def main(arguments: Sequence[str] | None = None) -> int:
    wanted = list(sys.argv[1:] if arguments is None else arguments)
    OUTPUTS.mkdir(exist_ok=True)
    for source in sources():
        if not wanted or source.name[:2] in wanted:
            began = time.monotonic()
            output_of(source).write_text(run(source))
            print(f"{source.name}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
