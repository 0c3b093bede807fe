"""Change one operator, comparison or constant of the source, run the tests, and see which tier notices.

    python tools/bench/mutants.py                            # 10 mutants in each room, drawn with seed 0
    python tools/bench/mutants.py --rooms balance --each 3 --seed 1 --json mutants.json

A mutant is tried in a copy of the tracked files. The tests whose imports lead to its file run in the order of their
distance (`touched.py`), first those without the mark `deep`, then, if none failed, the deep ones, up to `--reach`
imports away. A mutant that no test notices is a gap in the tests, or a change without an effect: a person has to look.
The exit status is 0, even if mutants survive.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from megatron_rl.tools.bench.touched import ROOT, git, tests_of

ROOMS = (
    *("actor", "algorithms", "balance", "bridge", "cluster", "convert"),
    *("data", "layout", "loop", "planning", "rollout", "verifiers"),
)
TIERS = {"test": "not deep", "deep": "deep"}
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **{
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Add,
        ast.Div: ast.Mult,
        ast.FloorDiv: ast.Mult,
        ast.Mod: ast.Mult,
    },
    **{ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
}


@dataclass(frozen=True)
class Mutant:
    """One changed expression. `start` and `end` are offsets in the bytes of the file.

    >>> Mutant("megatron_rl/balance/cap.py", 120, 125, 7, "a < b", "a <= b")
    """

    file: str
    start: int
    end: int
    line: int
    before: str
    after: str

    @property
    def room(self) -> str:
        return Path(self.file).parts[1]


@dataclass
class Result:
    mutant: Mutant
    killed_by: str
    """The tier that noticed, or "" if none did."""
    test: str
    """The first test that failed; "time-out" if the tests did not end."""


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of a file below the root. Docstrings, annotations, messages of errors and assertions stay."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offsets(node: ast.expr) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore

    for node, changed in _changes(ast.parse(source)):
        start, end = offsets(node)
        before = source[start:end].decode()
        yield Mutant(str(path), start, end, node.lineno, before, changed if _is_number(node) else f"({changed})")


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """(expression, its text after the change), below a node."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS and not _is_text(node):
        yield node, _with(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield node, _with(node, ops=[OPERATORS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub) and not _is_number(node.operand):
        yield node, ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif _is_number(node):
        yield node, repr(node.value + 1 if isinstance(node.value, int) else node.value * 1.5 + 0.5)  # type: ignore
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _changes(child)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(n, ast.Constant) and isinstance(n.value, str | bytes) or isinstance(n, ast.JoinedStr)
        for n in ast.walk(node)
    )


def _with(node: ast.AST, **fields: object) -> str:
    copy = type(node)(**{name: getattr(node, name) for name in node._fields} | fields)
    return ast.unparse(ast.fix_missing_locations(ast.copy_location(copy, node)))


def draw(room: str, count: int, seed: int) -> list[Mutant]:
    """Mutants of a room, each place as likely as any other."""
    paths = sorted((ROOT / "megatron_rl" / room).rglob("*.py"))
    every = [mutant for path in paths for mutant in mutants_of(path.relative_to(ROOT))]
    return random.Random(f"{seed} {room}").sample(every, min(count, len(every)))


def copy_tree(target: Path) -> Path:
    """The tracked files, as they are in the working folder, and the environment."""
    for name in git("ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        source, place = ROOT / name, target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            place.symlink_to(os.readlink(source))
        elif source.is_file():
            shutil.copy2(source, place)
    for command in (["init", "-q"], ["add", "-A"]):  # some tests ask git which files there are
        subprocess.run(["git", *command], cwd=target, check=True, capture_output=True)
    (target / ".venv").symlink_to(ROOT / ".venv")
    return target


def try_out(mutant: Mutant, tree: Path, reach: int, limit_s: float) -> Result:
    path = tree / mutant.file
    source = path.read_bytes()
    chains = tests_of([Path(mutant.file)])
    tests = [str(test) for test, chain in chains.items() if len(chain) - 1 <= reach and (tree / test).exists()]
    path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    try:
        for tier, marked in TIERS.items():
            failed = first_failure(tree, [*tests, "-m", marked], limit_s) if tests else ""
            if failed:
                return Result(mutant, tier, failed)
        return Result(mutant, "", "")
    finally:
        path.write_bytes(source)


def first_failure(tree: Path, arguments: list[str], limit_s: float) -> str:
    """The first test that fails, or an empty text."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # A file that is above its budget, because the machine is busy, has not noticed a mutant.
    without = ["-p", "no:cacheprovider", "-p", "no:budget"]
    command = [sys.executable, "-m", "pytest", "-x", *without, "--tb=no", "--no-header", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = run.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "time-out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        if status in (0, 5):
            return ""
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return lines[0] if lines else f"pytest ended with status {status}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS, metavar="ROOM")
    parser.add_argument("--each", type=int, default=10, help="mutants of each room (10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--reach", type=int, default=2, help="the most imports between a test and the mutant's file (2)"
    )
    parser.add_argument("--limit", type=float, default=900.0, metavar="S", help="seconds for a tier's tests (900)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one line for each mutant")
    given = parser.parse_args(arguments)
    mutants = [mutant for room in given.rooms for mutant in draw(room, given.each, given.seed)]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            trees.put(copy_tree(Path(folder) / str(number)))

        def run(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                return try_out(mutant, tree, given.reach, given.limit)
            finally:
                trees.put(tree)

        for result in pool.map(run, mutants):
            results.append(result)
            mutant = result.mutant
            verdict = f"{result.killed_by}: {result.test}" if result.killed_by else "LIVES"
            print(f"{mutant.file}:{mutant.line}  {mutant.before!r} -> {mutant.after!r}  {verdict}", flush=True)
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    print(f"\n{'room':<12} mutants  test  deep  live")
    for room in given.rooms:
        of_room = [result.killed_by for result in results if result.mutant.room == room]
        counts = Counter(of_room)
        print(f"{room:<12} {len(of_room):>7}  {counts['test']:>4}  {counts['deep']:>4}  {counts['']:>4}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
