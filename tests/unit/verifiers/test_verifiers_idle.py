"""Tests that pass for functions that do nothing are found by running them without a program."""

import json
from pathlib import Path

import pytest

from megatron_rl.verifiers.sandbox.code import idle

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "humaneval.jsonl").open()]


@pytest.mark.parametrize(
    ("tests", "result"),
    [
        (["assert not abs(f(1) - 2.5) > 1e-6"], "NaN"),
        (["d = abs(f(1) - 2.5)\nif d > 1e-6:\n    raise AssertionError"], "NaN"),
        (["assert max(1e-9, abs(Solution().f(1) - 2.5)) < 1e-6"], "NaN"),
        (["assert all(a == b for a, b in zip(f(3), [1, 2, 3]))"], "[]"),
        (["for a, b in zip(f(3), [1, 2, 3]):\n    assert a == b", "assert not f(0)"], "[]"),
        (["try:\n    assert f(1) == 2\nexcept Exception:\n    pass"], "None"),
        (["import sys\ndef check(g):\n    assert g(1) != 3\ncheck(f)\nsys.exit(0)"], None),
        (["assert f(0) is None", "assert f(1) == 1"], None),
        (["assert f([]) == []\nassert f([1]) == [1]"], None),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "add"}, None),
        ({"inputs": [[1]], "outputs": [None], "fn_name": "add"}, "None"),
    ],
)
def test_rows_that_functions_without_an_effect_pass(tests, result):
    num_tried, found = idle([tests, [{"input": "1", "output": "2"}]], within_s=60)
    assert num_tried == 1, "a program that reads and prints is not tried"
    assert [line.partition(",")[0] for line in found] == ([result] if result else [])


def test_a_test_without_an_end_leaves_what_was_tried_before():
    tests = [
        ["assert not f(1) > 2.5"],
        ["assert f(1) == 2\n"],
        ["while not f(1): pass\nassert f(1) == 2"],
        ["assert not f(1)"],
    ]
    num_tried, found = idle(tests, within_s=1)
    assert num_tried == 2 and len(found) == 1


def test_no_row_of_humaneval_passes():
    assert idle([row["ground_truth"] for row in ROWS], within_s=60) == (len(ROWS), [])
