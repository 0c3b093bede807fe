"""Run the deep tests that a change touches: their imports lead to a changed file.

    python tools/bench/touched.py                  # changes since origin/main, or since the last tag
    python tools/bench/touched.py --base HEAD~3    # since another commit; changes that are not committed count too
    python tools/bench/touched.py --list           # print the choice and its reasons, and run nothing

An import counts wherever it stands in a file, except under TYPE_CHECKING. A text that is the path of a source file
counts as an import too; so does one that names a module in the same folder, because some modules are imported by name,
and in tests of whole runs one that names a command. A changed test runs whole, and so do the house's rules.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from megatron_rl.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("megatron_rl", "recipes", "tools", "slurm")
RUNS = (("tests", "e2e"), ("tests", "nodes"), ("tests", "slurm"))
LINKED = ("recipes", "tools", "slurm")
"""Folders that are imported below `megatron_rl`."""


def files() -> list[Path]:
    """All Python files of the sources and the tests, relative to the root."""
    found = [path for top in (*SOURCES, "tests") for path in (ROOT / top).rglob("*.py")]
    inside = {path.relative_to(ROOT) for path in found}
    return sorted(path for path in inside if path.parts[0] != "megatron_rl" or path.parts[1] not in LINKED)


def module_names(gone: Sequence[Path] = ()) -> dict[str, Path]:
    """The file of each module of the package, and of deleted modules."""
    names = {}
    for path in [*files(), *gone]:
        if path.parts[0] in SOURCES:
            parts = (
                path.with_suffix("").parts
                if path.parts[0] == "megatron_rl"
                else ("megatron_rl", *path.with_suffix("").parts)
            )
            names[".".join(parts).removesuffix(".__init__")] = path
    return names


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under TYPE_CHECKING."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting.extend(node.orelse)
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def imports_of(path: Path, names: dict[str, Path]) -> set[Path]:
    """The files that a file imports, or names."""
    here = path.parent
    found: set[Path] = set()

    def module(name: str) -> bool:
        """Add a module and the packages above it; is it one of this project?"""
        parts = name.split(".")
        if parts[0] == "megatron_rl":
            # The package itself imports the API, but only for those who ask it for a name.
            first = min(2, len(parts))
            found.update(
                names[".".join(parts[:i])] for i in range(first, len(parts) + 1) if ".".join(parts[:i]) in names
            )
            return name in names
        beside = next(
            (top / f"{parts[0]}.py" for top in (here, Path("tests")) if (ROOT / top / f"{parts[0]}.py").exists()), None
        )
        if path.parts[0] == "tests" and beside is not None:
            found.add(beside)
            return True
        return False

    for node in _nodes(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            module(node.module)
            for alias in node.names:
                module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if "/" in text and len(text) < 200 and text.isprintable() and (ROOT / text).is_file():
                found.add(Path(text))  # a script, a configuration, data
            elif text.replace(".", "").isidentifier() and (ROOT / here / f"{text.split('.')[0]}.py").exists():
                found.add(here / f"{text.split('.')[0]}.py")
            elif text.startswith(("recipes.", "tools.", "commands.", "migrate.")) and f"megatron_rl.{text}" in names:
                found.add(names[f"megatron_rl.{text}"])
            elif path.parts[:2] in RUNS and text in COMMANDS:
                found.add(names[f"megatron_rl.{COMMANDS[text][0]}"])
    if path.parts[0] == "tests":
        found.update(
            p / "conftest.py" for p in [here, *here.parents] if (ROOT / p / "conftest.py").exists() and p != Path()
        )
    return found - {path}


@cache
def importers(gone: tuple[Path, ...] = ()) -> dict[Path, set[Path]]:
    """For each file, the files that import it, or name it.

    Args:
        gone: modules that were deleted or renamed; who still imports them is touched.
    """
    names = module_names(gone)
    found: dict[Path, set[Path]] = {path: set() for path in files()}
    for path in list(found):
        for other in imports_of(path, names):
            found.setdefault(other, set()).add(path)
    return found


def tests_of(changed: Iterable[Path]) -> dict[Path, list[Path]]:
    """For each test file that the changed files reach: the chain of imports, from the test to a changed file. The files
    with the shortest chains come first."""
    changed = list(changed)
    above = importers(gone_of(changed))
    chains = {path: [path] for path in changed}
    waiting = deque(chains)
    while waiting:
        path = waiting.popleft()
        for other in sorted(above.get(path, ())):
            if other not in chains:
                chains[other] = [other, *chains[path]]
                waiting.append(other)
    return {path: chain for path, chain in chains.items() if path.name.startswith("test_")}


def gone_of(changed: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(path for path in changed if path.suffix == ".py" and not (ROOT / path).exists())


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def default_base() -> str:
    for words in (["rev-parse", "--verify", "--quiet", "origin/main"], ["describe", "--tags", "--abbrev=0"]):
        try:
            return git(*words).strip()
        except subprocess.CalledProcessError:
            continue
    raise SystemExit("touched: there is neither origin/main nor a tag; name a commit, for example --base HEAD~1")


def changed_since(base: str) -> list[Path]:
    """What differs between a commit and the working folder, new files included."""
    try:
        names = (
            git("-c", "core.quotePath=false", "diff", "--no-renames", "--name-only", base).splitlines()
            + git("-c", "core.quotePath=false", "ls-files", "--others", "--exclude-standard").splitlines()
        )
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"touched: git knows no commit {base!r}: {error.stderr.strip()}") from None
    return sorted({Path(name) for name in names})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="the commit before the change (default: origin/main, or the last tag)")
    parser.add_argument("--list", action="store_true", help="print the choice, and run nothing")
    parser.add_argument("rest", nargs="*", metavar="PYTEST", help="arguments for pytest, after --")
    given = parser.parse_args(arguments)
    base = given.base or default_base()
    changed = changed_since(base)
    known = {*files(), *importers(gone_of(changed))}
    reached = {
        path: chain
        for path, chain in tests_of(path for path in changed if path in known).items()
        if (ROOT / path).exists()
    }
    others = [path for path in changed if path not in known]
    print(f"{len(changed)} files differ from {base}")
    for path, chain in reached.items():
        why = "it changed itself" if len(chain) == 1 else "imports " + " -> ".join(map(str, chain[1:]))
        print(f"  {path}: {why}")
    if others:
        print(f"  no import leads to {', '.join(map(str, others))}: tests/house has the rules for such files")
    if given.list:
        return 0
    whole = [str(path) for path, chain in reached.items() if len(chain) == 1]
    whole += [] if "tests/house/test_house.py" in whole else ["tests/house/test_house.py"]
    deep = [str(path) for path in reached if str(path) not in whole]
    status = _pytest([*given.rest, *whole])
    return _pytest(["-m", "deep", *given.rest, *deep]) or status if deep else status


def _pytest(arguments: list[str]) -> int:
    status = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT).returncode
    return 0 if status == 5 else status  # no test of these files is deep


if __name__ == "__main__":
    sys.exit(main())
