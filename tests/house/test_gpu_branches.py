"""Each place where the code decides by the kind of device is in tests/gpu_branches.json, with what is known about its
side for GPUs: it `ran` on one, it is `tested` by a test that takes it on a CPU, `read` only, or `unknown`."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = {"HAS_CUDA", "HAS_TRANSFORMER_ENGINE", "is_cuda", "on_gpu", "on_gpus", "fused", "_shares_gpus", "shares_gpus"}
DEVICES = {"cpu", "cuda", "nccl"}
KINDS = ("ran: ", "tested: ", "read: ", "unknown: ")
LIST = ROOT / "tests" / "gpu_branches.json"


def test_every_branch_by_the_kind_of_device_is_on_the_list_with_what_proves_it():
    listed = json.loads(LIST.read_text())
    found = {name: number for name, (number, _) in listed.items()}
    assert decisions() == found, f"say in {LIST.relative_to(ROOT)} what is known about a new place's side for GPUs"
    assert all(proof.startswith(KINDS) for _, proof in listed.values())


def test_the_tests_on_the_list_exist():
    for name, (_, proof) in json.loads(LIST.read_text()).items():
        for word in proof.split():
            if word.startswith("tests/"):
                path, _, test = word.rstrip(".,;").partition("::")
                assert test in (ROOT / path).read_text() if test else (ROOT / path).exists(), (name, word)


def decisions() -> dict[str, int]:
    """The number of conditions about the device, by file and function. Planning and commands only have numbers."""
    found = Counter[str]()
    for path in sorted((ROOT / "megatron_rl").rglob("*.py")):
        name = str(path.relative_to(ROOT / "megatron_rl"))
        if not name.startswith(("planning", "commands")):
            for scope, condition in conditions(ast.parse(path.read_text()), ()):
                if any(map(names_a_device, ast.walk(condition))):
                    found[f"{name} {'.'.join(scope)}".strip()] += 1
    return dict(found)


def conditions(tree: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.expr]]:
    for child in ast.iter_child_nodes(tree):
        own = (
            (*scope, child.name) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else scope
        )
        if isinstance(child, ast.If | ast.IfExp):
            yield own, child.test
        elif isinstance(child, ast.BoolOp) and not isinstance(tree, ast.If | ast.IfExp | ast.BoolOp):
            yield own, child
        elif isinstance(child, ast.comprehension):
            yield from ((own, condition) for condition in child.ifs)
        yield from conditions(child, own)


def names_a_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value in DEVICES
    return (isinstance(node, ast.Name) and node.id in FLAGS) or (isinstance(node, ast.Attribute) and node.attr in FLAGS)
