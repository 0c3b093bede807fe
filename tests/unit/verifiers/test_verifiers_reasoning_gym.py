"""Answers to the tasks of reasoning-gym, as a run judges them, and the rows of all tasks."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from answering import answered
from hypothesis import given
from hypothesis import strategies as st
from patience import deadline

from megatron_rl.commands.reasoning_gym_rows import rows_of, task_names
from megatron_rl.config.rewards import ReasoningGymReward
from megatron_rl.types import Prompt, Verdict
from megatron_rl.verifiers import reasoning_gym
from megatron_rl.verifiers.answer import Answer
from megatron_rl.verifiers.columns import fault_of_row
from megatron_rl.verifiers.ground_truth import GroundTruthVerifier, Judge
from megatron_rl.verifiers.reasoning_gym import REFUSED, final_answer, library, verify


class Letters:
    """Token i is the character with this code."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join(map(chr, ids))


def answer(text: str, truth: object, finish: str = "stop") -> Answer:
    return answered(Prompt("rows.jsonl:7", (1,), "question", {"ground_truth": truth}), list(map(ord, text)), finish)


def truth(task: str, own: str | None = None, **metadata: object) -> dict[str, object]:
    return {"task": task, "answer": own, "metadata": metadata, "config": {}}


LATIN = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]
SUDOKU = truth("mini_sudoku", "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1", solution=LATIN)
GRAPH = truth("graph_color", puzzle={"vertices": [0, 1], "edges": [[0, 1]], "color_options": [1, 2]})
PREMISES = truth("propositional_logic", premises=["P", "(P → Q)"], variables=["P", "Q"])
SQUARE = truth("binary_matrix", "0 1\n1 2")
CASES = [
    (truth("leg_counting", "26"), "26", 1.0),
    (truth("leg_counting", "26"), "27", 0.0),
    (truth("leg_counting", "26"), "about 26", 2 / 8),  # the base scorer: the share of the answer that is right
    (truth("caesar_cipher", "JUST A TEST"), "JUST A TEST", 1.0),
    (truth("caesar_cipher", "JUST A TEST"), "KVTU B UFTU", 0.0),
    (truth("chain_sum", "1000"), "+01,000.00", 1.0),
    (truth("puzzle24", numbers=[7, 3, 8, 2]), "(7 - 3) * (8 - 2)", 1.0),
    (truth("puzzle24", numbers=[7, 3, 8, 2]), "7 + 3 + 8 + 2", 0.01),
    (truth("puzzle24", numbers=[7, 3, 8, 2]), "12 * 2", 0.01),
    (truth("puzzle24", numbers=[7, 3, 8, 2]), "4*8 - 6 - 2", 0.01),
    (truth("puzzle24", numbers=[9, 9, 9, 9]), "9**9**9**9", 0.01),
    (truth("countdown", "9*9", numbers=[9, 9, 9], target=81), "9**9**9", 0.01),
    (truth("countdown", "9*9", numbers=[10], target=81), "exp(exp(exp(10)))", 0.01),
    (truth("polynomial_multiplication", "x"), "2**(2**30)", 0.0),
    (truth("countdown", numbers=[3, 5, 2], target=13), "3 * 5 - 2", 1.0),
    (truth("countdown", numbers=[3, 5, 2], target=13), "3 + 5 + 2", 0.05),
    (truth("countdown", numbers=[3, 5, 2], target=13), "thirteen", 0.01),
    (SUDOKU, "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1", 1.0),
    (SUDOKU, "1 2 3 4\n3 4 1 1", 0.9 * 7 / 16),
    (truth("prime_factorization", "2 × 2 × 3"), "3 × 2 × 2", 1.0),
    (truth("prime_factorization", "2 × 2 × 3"), "4 × 3", 0.5),
    (truth("prime_factorization", "2 × 2 × 3"), "5", 0.01),
    (SQUARE, "0 1\n1 2", 1.0),
    (SQUARE, "[[0, 1], [1, 2]]", 0.1),
    (truth("spiral_matrix", "1 2 4 3"), "[1, 2, 4, 3]", 0.1),
    (truth("string_insertion", "ABCD"), "['A', 'B', 'C', 'D']", 0.1),
    (truth("simple_integration", variable="x", integrand="2*x + 1"), "x**2 + x + C", 1.0),
    (truth("simple_integration", variable="x", integrand="2*x + 1"), "2*x**2", 0.0),
    (truth("intermediate_integration", variable="x", integrand="x*exp(x)"), "exp(x)*(x - 1) + C", 1.0),
    (truth("polynomial_multiplication", "x**2 - 1"), "-1 + x**2", 1.0),
    (truth("bitwise_arithmetic", "0x30", problem="(0xc << 0x2)"), "48", 1.0),
    (truth("arc_agi", "1 2\n3 4", output=[[1, 2], [3, 4]]), "1 2\n3 4", 1.0),
    (truth("arc_agi", "1 2\n3 4", output=[[1, 2], [3, 4]]), "1 2\n3 5", 0.05),
    # Tasks without an answer of the library's own.
    (GRAPH, '{"0": 1, "1": 2}', 1.0),
    (GRAPH, '{"0": 1, "1": 1}', 0.01),
    (PREMISES, "(P ∧ Q)", 1.0),
    (PREMISES, "Q", 0.25),
    (PREMISES, "¬Q", 0.05),
    (truth("rubiks_cube", cube_size=2, scramble_moves="R"), "R'", 1.0),
]


@pytest.mark.parametrize(("row", "text", "score"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_scores_by_hand(row, text, score):
    assert verify(f"so <answer>{text}</answer>", row) == Verdict(pytest.approx(score))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" 26\n", "26"),
        ("a <answer> 26 </answer> b", "26"),
        ("<answer>1</answer> no, <answer>\n2\n3\n</answer>", "2\n3"),
        ("I write <answer> and then <answer>26</answer>", "26"),
        ("<answer>26</answer> and </answer>", "26"),
        ("<answer>26", "<answer>26"),
        ("<answer></answer>", ""),
    ],
)
def test_the_final_answer_is_in_the_last_pair_of_tags_or_all_of_the_text(text, found):
    assert final_answer(text) == found


def test_the_text_after_the_thought_is_judged():
    judge, row = Judge(ReasoningGymReward(), Letters(), "</think>"), truth("leg_counting", "26")
    assert judge(answer("<answer>1</answer></think>26", row)) == Verdict(1.0)
    assert judge(answer("<answer>26</answer></think>1", row)) == Verdict(0.0)
    assert judge(answer("26", row)) == Verdict(0.0, "no </think>")
    assert judge(answer("</think>26", row, "length")) == Verdict(0.0, "cut by the length budget")
    lenient = Judge(ReasoningGymReward(require_stop=False), Letters(), "</think>")
    assert lenient(answer("</think>26", row, "length")) == Verdict(1.0)


@pytest.mark.parametrize(
    "row", [None, "26", {"answer": "26"}, truth("leg_counting", "26") | {"config": None}, truth("leg_counting", 26)]
)
def test_a_row_without_the_ground_truth_of_a_task_fails(row):
    fault = fault_of_row(ReasoningGymReward(), {"ground_truth": row})
    assert fault.startswith("the reasoning_gym reward needs a `ground_truth` that is a mapping with task, answer,")
    assert verify("26", row) == Verdict(None, fault, failed=True)


@pytest.mark.deep
def test_the_library_is_not_imported_to_check_rows():
    code = (
        "import sys\n"
        "from megatron_rl.config.rewards import ReasoningGymReward\n"
        "from megatron_rl.verifiers.columns import fault_of_row\n"
        "from megatron_rl.verifiers.reasoning_gym import missing_package\n"
        f"assert fault_of_row(ReasoningGymReward(), {{'ground_truth': {truth('leg_counting', '26')!r}}}) is None\n"
        "assert missing_package() is None\n"
        "print('reasoning_gym' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


FACTORS, SPOILT = truth("prime_factorization", "2 × 3"), truth("prime_factorization", "two × 3")
UNREADABLE = Verdict(0.0, "the scorer of prime_factorization cannot read the answer: ValueError")


def test_an_error_of_a_scorer_is_no_way_out_for_an_answer():
    assert verify("2 × 3", FACTORS) == Verdict(1.0)
    assert verify("x", FACTORS) == UNREADABLE
    wrong_key = truth("leg_counting", "6") | {"config": {"no_key": 1}}
    for row, fault in [
        (SPOILT, "invalid literal for int"),
        (truth("no_such_task"), "not registered"),
        (wrong_key, "no_key"),
    ]:
        with pytest.raises((ValueError, TypeError), match=fault):
            verify("x", row)


@pytest.mark.deep
def test_errors_of_a_scorer_are_failures_of_the_row():
    verifier = GroundTruthVerifier(ReasoningGymReward(answer_timeout_s=deadline(20)), Letters(), "", 1)
    rows = [FACTORS, FACTORS, SPOILT, truth("no_such_task"), truth("leg_counting", "6") | {"config": {"no_key": 1}}]
    answers = [answer(text, row) for text, row in zip(["2 × 3", "x", "x", "1", "6"], rows, strict=True)]
    right, unreadable, raised, unknown, key = verifier.score(answers)
    verifier.close()
    assert right == Verdict(1.0)
    assert unreadable == UNREADABLE
    assert all(verdict.failed and verdict.score is None for verdict in (raised, unknown, key))
    assert raised.reason.startswith("rows.jsonl:7: the judge raised ValueError: invalid literal for int()")
    assert "Dataset 'no_such_task' not registered" in unknown.reason and "no_key" in key.reason


@pytest.mark.parametrize("score", [1.5, -0.1, float("nan"), None, "1"])
def test_a_score_outside_of_0_to_1_is_a_failure(score, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "_scorer", lambda task, config: lambda text, entry: score)
    verdict = verify("26", truth("leg_counting", "26"))
    assert verdict.failed and verdict.score is None
    assert verdict.reason.startswith(f"the scorer of leg_counting gave {score!r}")


def test_the_configuration_of_a_task_reaches_its_scorer():
    row = truth("decimal_arithmetic", "1.25")
    assert verify("1.252", row).score == 0.0
    assert verify("1.252", row | {"config": {"max_num_decimal_places": 2}}).score == 1.0


CODE = [
    "__import__('pathlib').Path({!r}).touch()",
    "[c for c in [open({!r}, 'w')]]",
    "exec(\"open('{}', 'w')\")",
    "open({!r}, 'w')",
    "(lambda: open({!r}, 'w'))()",
    "sin(open({!r}, 'w'))",
]


@pytest.mark.parametrize("text", ["[0]", "NaN", '{"a": 1}'])
def test_an_answer_in_another_form_scores_0_where_a_row_has_no_answer_of_its_own(text):
    """An abstention would let a policy escape the score 0."""
    [row] = rows_of("boxnet", {}, 1, 0)
    assert row["ground_truth"]["answer"] is None and verify(text, row["ground_truth"]).score == 0.0


EVALUATED = {
    "binary_matrix": truth("binary_matrix", "0 1\n1 2"),
    "spiral_matrix": truth("spiral_matrix", "1 2 4 3"),
    "string_insertion": truth("string_insertion", "ABCD"),
    "n_queens": truth("n_queens", "Q", valid_answers=["Q"]),
    "simple_integration": truth("simple_integration", variable="x", integrand="x"),
    "intermediate_integration": truth("intermediate_integration", variable="x", integrand="x"),
    "polynomial_multiplication": truth("polynomial_multiplication", "x"),
    "puzzle24": truth("puzzle24", numbers=[1]),
    "countdown": truth("countdown", numbers=[1], target=1),
}


@pytest.mark.parametrize("task", EVALUATED)
def test_no_answer_runs_as_code(task, tmp_path):
    made = tmp_path / "made"
    for code in CODE:
        assert verify(code.format(str(made)), EVALUATED[task]).score < 0.1
    assert not made.exists()


def test_no_expression_of_a_row_runs_as_code(tmp_path):
    made = tmp_path / "made"
    for code in CODE:
        assert verify("1", truth("bitwise_arithmetic", "1", problem=code.format(str(made)))).score == 0.0
        assert verify("[1]", truth("number_sorting", code.format(str(made)), direction="ascending")).score == 0.0
    assert not made.exists()


FORMULA = ["x", "2", "1.5", "+", "-", "*", "**", "/", "(", ")", ",", " ", "sin", "exp", ".", "C", "E", "1e3", "!"]
CALLS = ["__import__", "exec", "open", "eval", "sympify", "S", "lambdify", "getattr", "'os'", "_", "[", "lambda"]


@given(st.lists(st.sampled_from(FORMULA + CALLS), max_size=8))
def test_a_formula_with_a_name_that_can_do_something_is_refused(parts):
    def parsed(text: str) -> str:
        return text

    text = " ".join(parts)
    if set(parts) & set(CALLS):
        with pytest.raises(ValueError, match="no formula|neither a symbol nor"):
            reasoning_gym._parsed(parsed, text)
    elif "." not in parts:
        assert reasoning_gym._parsed(parsed, text) == text


NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""The tasks for which the library has no answer of its own, because many answers are right or none is known."""


@pytest.mark.deep
def test_the_library_s_own_answer_to_a_row_of_any_task_scores_1_after_json():
    tasks, own_scores, changed = task_names(), {}, []
    for task in tasks:
        [row] = rows_of(task, {}, 1, 3)
        read = json.loads(json.dumps(row))["ground_truth"]
        own = read["answer"]
        own_scores[task] = None if own is None else verify(f"<answer>{own}</answer>", read).score
        assert verify("", read).score < 0.1, "a cut answer is judged as an empty one, to see if the row can be used"
        texts = ["0", "[[1]]", "a b", (own or "")[:-1]]
        changed += [(task, text) for text in texts if scored(text, read) != scored(text, row["ground_truth"])]
    assert own_scores == {task: None if task in NO_ANSWER else 1.0 for task in tasks} and len(tasks) > 100
    assert changed == []


def scored(text, row):
    try:
        return verify(text, row)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        return type(error)


def test_tasks_that_are_refused_have_the_fault_that_is_said():
    from reasoning_gym.factory import DATASETS

    assert DATASETS.keys() - set(task_names()) == REFUSED.keys()
    for task, constant in {"coin_flip": "0", "complex_arithmetic": "nan", "game_of_life_halting": "x"}.items():
        rows = list(library().create_dataset(task, size=8, seed=11))
        assert len({row["answer"] for row in rows}) > 1
        assert all(library().create_dataset(task).score_answer(constant, row) == 1.0 for row in rows)


EVALUATION = re.compile(r"(?<![\w.])((?:(?:sp|sympy)\.)?(?:__import__|compile|eval|exec|parse_expr|sympify|S))\(")


def test_every_evaluation_in_the_library_is_replaced_or_known():
    """Another version of the library may evaluate answers elsewhere."""
    library()
    from reasoning_gym.factory import DATASETS

    found = set()
    for module in {sys.modules[dataset.__module__] for dataset, _ in DATASETS.values()}:
        for name in EVALUATION.findall(inspect.getsource(module)):
            value = vars(module).get(name.partition(".")[0])
            ours = isinstance(value, SimpleNamespace | partial) or value in (ast.literal_eval, reasoning_gym._bitwise)
            if not ours:
                found.add((module.__name__.removeprefix("reasoning_gym."), name))
    assert found == {
        ("arithmetic.basic_arithmetic", "eval"),  # the task's own text, when a row is made
        ("code.codeio", "exec"),  # the library's own programs, when a row is made
        ("logic.propositional_logic", "parse_expr"),  # a parser of its own
    }
