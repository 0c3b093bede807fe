"""Reward functions as TRL's documentation shows them, called as a run calls them; their paths and arguments."""

from __future__ import annotations

import asyncio
import functools
import math
import re
import signal
import sys
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from contracts import CHAT, STATE, TWO, Letters, answer, scored, scores

from megatron_rl.config.function import load_function
from megatron_rl.config.rewards import ComputeScoreReward, FunctionReward
from megatron_rl.types import Conversation, Verdict
from megatron_rl.verifiers import RewardSet


def trl(function: str, **changes) -> FunctionReward:
    return FunctionReward(**{"path": f"{__name__}:{function}"} | changes)


SEEN: list[dict] = []


def record(**given):
    SEEN.append(given)
    return [0] * len(given["completions"])


def boxed(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
    rewards = [1.0 if match and match[1] == truth else 0.0 for match, truth in zip(found, ground_truth, strict=True)]
    if log_extra:
        log_extra("found", [str(match) for match in found])
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
        log_metric("accuracy", np.float32(1.0))
    return rewards


async def grades(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


def warm_up(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]


def by_epoch(completions, trainer_state, **kwargs):
    return [trainer_state.epoch for _ in completions]


def two_columns_alone(completions, level):
    return [one and one * len(text) for text, one in zip(completions, level, strict=True)]


def scaled(completions, factor, **kwargs):
    return [factor * len(text) for text in completions]


tripled = functools.partial(scaled, factor=3)


class Counted:
    num_made = 0

    def __init__(self, first=0):
        Counted.num_made += 1
        self.value = first

    def __call__(self, completions, **kwargs):
        self.value += 1
        return [self.value for _ in completions]


class CountedAsync(Counted):
    async def __call__(self, completions, **kwargs):
        return super().__call__(completions)


class GivesUp:
    def __init__(self):
        sys.exit("no licence")


class NotCallable:
    pass


class NeedsMore:
    def __init__(self, model):
        self.model = model


counting = Counted(10)
Counted.num_made = 0


class Tensor:
    """What torch's tensors have in common with NumPy's arrays."""

    def __init__(self, values):
        self.values = values

    def tolist(self):
        return self.values


def test_a_function_gets_what_trl_gives():
    SEEN.clear()
    assert scores(trl("record"), [TWO[0], answer("b", CHAT, ground_truth="z", level=4)]) == [0.0, 0.0]
    [given] = SEEN
    assert callable(given.pop("log_metric")) and callable(given.pop("log_extra"))
    assert given == {
        "prompts": ["What is 1+1?", [{"role": "user", "content": "What is 1+1?"}]],
        "completions": [r"so \boxed{2}", [{"role": "assistant", "content": "b"}]],
        "completion_ids": [[*map(ord, r"so \boxed{2}"), 0], [ord("b"), 0]],
        "environments": [None, None],
        "trainer_state": STATE,
        "ground_truth": ["2", "z"],
        "level": [None, 4],
    }


def test_a_completion_of_several_turns_is_its_turns_and_environments_are_their_attributes():
    SEEN.clear()
    turns = ({"role": "assistant", "content": "a"}, {"role": "tool", "name": "add", "content": "3"})
    said = Conversation((*turns, {"role": "assistant", "content": "b"}), " now", {"total": [1]})
    given = replace(answer("b", CHAT, ground_truth="z"), conversation=said)
    assert scores(trl("record"), [given]) == [0.0]
    [seen] = SEEN
    assert seen["completions"] == [[*turns, {"role": "assistant", "content": "b"}]]
    assert seen["prompts"] == [[{"role": "user", "content": "What is 1+1? now"}]]
    [environment] = seen["environments"]
    environment.total.append(2)
    seen["completions"][0][0]["content"] = "changed"
    assert said.state == {"total": [1]} and said.turns[0]["content"] == "a", "functions get copies"
    with pytest.raises(AttributeError, match="'lock'"):
        _ = environment.lock


def test_a_function_of_trls_documentation():
    given = scored(trl("boxed", name="format"))
    assert [verdict.score for verdict in given.verdicts] == [1.0, 0.0]
    assert given.metrics == {"reward/format/accuracy": 0.75}
    found = [verdict.details["format/found"] for verdict in given.verdicts]
    assert found[0].startswith("<re.Match object") and found[1] == "None"


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (trl("warm_up"), [0.07, 0.07]),
        (trl("two_columns_alone"), [None, 28.0]),
        (trl("scaled", arguments={"factor": 2}), [24.0, 14.0]),
        (trl("tripled"), [36.0, 21.0]),
        (trl("grades"), [12.0, 7.0]),
        (trl("two_columns_alone", arguments={"level": [1, 2]}), [12.0, 14.0]),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_each_kind_of_function(cfg, expected):
    assert scores(cfg) == expected


@pytest.mark.parametrize("name", ["Counted", "CountedAsync"])
def test_a_class_is_made_once_with_its_arguments(name):
    Counted.num_made = 0
    rewards = RewardSet([trl(name, arguments={"first": 5})], Letters(), "")
    for expected in (6.0, 7.0):
        assert [verdict.score for verdict in rewards.score([0], TWO, STATE)[0].verdicts] == [expected] * 2
    assert Counted.num_made == 1


def test_an_object_of_a_module_keeps_its_state():
    counting.value = 10
    assert [scores(trl("counting")), scores(trl("counting"))] == [[11.0, 11.0], [12.0, 12.0]]


class SaysTwo(list):
    def __len__(self):
        return 2


class Exits:
    """All that one asks of it ends the process, as code that a model wrote may do."""

    def tolist(self):
        raise SystemExit(3)

    __repr__ = __str__ = __float__ = tolist


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([1, True], [1.0, 1.0]),
        ((0.5, None), [0.5, None]),
        (np.array([1.5, 2.0], np.float32), [1.5, 2.0]),
        ([np.float64(0.25), np.bool_(True)], [0.25, 1.0]),
        ([np.array(3), Tensor(4.5)], [3.0, 4.5]),
        (Tensor([1, 0]), [1.0, 0.0]),
        (None, "returned NoneType, but it must return a list"),
        (1.0, "returned float, but it must return a list"),
        ("12", "returned str, but"),
        (np.array(1.0), "returned float, but"),
        ([1.0], "returned 1 scores for 2 completions"),
        (SaysTwo([1.0, 1.0, 1.0]), "returned 3 scores for 2 completions"),
        (["1.0", 1.0], r"returned '1.0' \(str\) for completion 0"),
        (np.ones((2, 1)), r"returned \[1.0\] \(list\) for completion"),
        ([1.0, float("inf")], r"returned inf \(float\) for completion 1"),
        ([Decimal("0.5"), Fraction(1, 4)], [0.5, 0.25]),
        ([10**400, 1.0], r"returned 1000+\.\.\. \(int\) for completion 0, but it must return a finite number"),
        ([1e308, 1.0], r"returned 1e\+308 \(float\) for completion 0, but no score may be above 3.4e\+38"),
        ([10**5000, 1.0], r"returned a value that cannot be shown \(int\) for completion 0"),
        ([Fraction(-(10**400)), 1.0], r"\(Fraction\) for completion 0, but it must return a finite number"),
        (
            [1.0, Exits()],
            r"returned a value that cannot be shown \(Exits\) for completion 1, which raised .*SystemExit: 3",
        ),
        (Exits(), "raised .*SystemExit: 3"),
        (b"12", "returned bytes, but"),
        (memoryview(b"12"), "returned memoryview, but"),
    ],
)
def test_what_a_function_may_return(monkeypatch, result, expected):
    monkeypatch.setitem(globals(), "answers", lambda completions, **kwargs: result)
    verdicts = scored(trl("answers")).verdicts
    if isinstance(expected, list):
        assert [verdict.score for verdict in verdicts] == expected and not any(v.failed for v in verdicts)
        return
    failed = [verdict for verdict in verdicts if verdict.failed]
    assert failed and all(verdict.score is None and re.search(expected, verdict.reason) for verdict in failed)


def test_one_bad_number_costs_its_own_answer_alone(monkeypatch):
    monkeypatch.setitem(globals(), "answers", lambda completions, **kwargs: [float("nan"), 1.0])
    assert scores(trl("answers")) == [None, 1.0]


def test_an_abstention_is_no_failure(monkeypatch):
    monkeypatch.setitem(globals(), "answers", lambda completions, **kwargs: [None, 0.0])
    path = f"{__name__}:answers"
    assert scored(trl("answers")).verdicts == [Verdict(None, f"{path} returned None"), Verdict(0.0)]


class WithoutText(BaseException):
    def __str__(self):
        raise KeyboardInterrupt


def exits(**_):
    exec("raise SystemExit(1)")


def interrupts(**_):
    raise KeyboardInterrupt


def fails_a_test(**_):
    pytest.fail("not the answer")


def raises_without_text(**_):
    raise WithoutText


async def exits_later(**_):
    await asyncio.sleep(0)
    sys.exit("enough")


class Silent(Exception):
    __traceback__ = None


class Odd(Exception):
    """Formatting its traceback raises."""

    __cause__ = 1


class Own(BaseException):
    pass


async def exits_in_a_gathered_task(**_):
    async def one():
        sys.exit(3)

    await asyncio.gather(one())


async def exits_in_a_task(**_):
    async def one():
        exec("raise SystemExit(3)")

    await asyncio.create_task(one())


async def interrupts_in_a_group(**_):
    async def one():
        raise KeyboardInterrupt

    async with asyncio.TaskGroup() as group:
        group.create_task(one())


async def gets_a_signal(**_):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def raises_half_a_character(**_):
    raise ValueError("half: \ud800")


def hides_its_traceback(**_):
    raise Silent("hidden")


def hides_its_cause(**_):
    raise Odd("hidden")


def raises_its_own(**_):
    raise Own("mine")


def cancels(**_):
    raise asyncio.CancelledError("not me")


async def cancels_later(**_):
    await asyncio.sleep(0)
    raise asyncio.CancelledError("not me")


async def cancels_itself(**_):
    asyncio.current_task().cancel("not me")
    await asyncio.sleep(0)


def ends_a_generator(**_):
    raise GeneratorExit("not me")


async def ends_a_generator_later(**_):
    raise GeneratorExit("not me")


def raises_with_a_note(**_):
    error = ValueError("the cause")
    error.add_note("a note")
    raise error


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (exits, "SystemExit: 1"),
        (interrupts, "KeyboardInterrupt"),
        (fails_a_test, "Failed: not the answer"),
        (raises_without_text, "WithoutText"),
        (exits_later, "SystemExit: enough"),
        (exits_in_a_gathered_task, "SystemExit: 3"),
        (exits_in_a_task, "SystemExit: 3"),
        (interrupts_in_a_group, "KeyboardInterrupt"),
        (gets_a_signal, "KeyboardInterrupt"),
        (raises_half_a_character, r"ValueError: half: \ud800 ("),
        (hides_its_traceback, "Silent: hidden"),
        (hides_its_cause, "raised Odd ("),
        (raises_its_own, "Own: mine"),
        (cancels, "CancelledError: not me"),
        (cancels_later, "CancelledError: not me"),
        (cancels_itself, "CancelledError: not me"),
        (ends_a_generator, "GeneratorExit: not me"),
        (ends_a_generator_later, "GeneratorExit: not me"),
        (raises_with_a_note, "ValueError: the cause ("),
    ],
)
@pytest.mark.parametrize("contract", ["function", "compute_score"])
def test_what_would_end_the_process_is_a_failed_verdict_with_name_and_line(function, said, contract):
    configured = FunctionReward if contract == "function" else ComputeScoreReward
    reward = configured(path=f"{__name__}:{function.__name__}")
    for verdict in scored(reward).verdicts:
        assert verdict.failed and f"{__name__}:{function.__name__} raised " in verdict.reason and said in verdict.reason
        line = int(re.search(r"test_verifiers_functions\.py:(\d+)\)$", verdict.reason)[1])
        first = function.__code__.co_firstlineno
        assert first < line <= first + 3, "the line of the function, whatever it has called"


async def cancels_everybody(**_):
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


async def leaves_an_exit_behind(completions, **_):
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(0.01)
    return [1.0 for _ in completions]


def test_what_functions_do_to_the_event_loop_ends_neither_the_process_nor_the_next_call():
    rewards = RewardSet([trl("cancels_everybody"), trl("grades")], Letters(), "")
    for one in rewards.score([0, 1], TWO, STATE):
        assert all(v.failed and "cancels_everybody, grades: one of these" in v.reason for v in one.verdicts)
    assert [verdict.score for verdict in rewards.score([1], TWO, STATE)[0].verdicts] == [12.0, 7.0]
    assert scores(trl("leaves_an_exit_behind")) == [1.0, 1.0]


class InterruptsAtOnce:
    def __init__(self):
        raise KeyboardInterrupt


class RaisesItsOwn:
    def __init__(self):
        raise Own("no licence")


async def takes_away(prompts, completion_ids, nested, **_):
    await asyncio.sleep(0)
    for turns, ids, values in zip(prompts, completion_ids, nested, strict=True):
        ids.clear()
        values.append(100.0)
        turns[0]["tool_calls"].clear()
    return [0.0 for _ in completion_ids]


async def counts(prompts, completion_ids, nested, **_):
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    columns = zip(prompts, completion_ids, nested, strict=True)
    return [float(len(turns[0]["tool_calls"]) + len(ids) + sum(values)) for turns, ids, values in columns]


def test_functions_of_one_call_do_not_see_what_another_one_writes():
    turns = [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
    given = {"columns": {"nested": [3.0]}, "messages": turns}
    answers = [replace(one, prompt=replace(one.prompt, **given)) for one in TWO]
    together = RewardSet([trl("takes_away"), trl("counts")], Letters(), "")
    alone = RewardSet([trl("counts")], Letters(), "")
    [expected] = alone.score([0], answers, STATE)
    assert together.score([0, 1], answers, STATE)[1].verdicts == expected.verdicts
    assert all(verdict.score >= 4 for verdict in expected.verdicts)
    assert turns[0]["tool_calls"]


def logs_too_much(completions, log_metric, **_):
    with pytest.raises(ValueError, match="inf|number"):
        log_metric("size", "large")
    log_metric("size", 2.0)
    return [0.0 for _ in completions]


def test_a_metric_that_was_refused_leaves_nothing():
    assert scored(trl("logs_too_much")).metrics == {"reward/logs_too_much/size": 2.0}


def logs_extremes(completions, log_metric, log_extra, **_):
    for name, values in (("both", (math.inf, -math.inf)), ("large", (1e308, 1e308)), ("inf", (math.inf, 1.0))):
        for value in values:
            log_metric(name, value)
    return [0.0 for _ in completions]


def test_metrics_may_be_infinite_or_too_large_to_be_added():
    metrics = scored(trl("logs_extremes")).metrics
    assert math.isnan(metrics.pop("reward/logs_extremes/both"))
    assert metrics == {"reward/logs_extremes/large": 1e308, "reward/logs_extremes/inf": math.inf}


def crashes(**_):
    raise RuntimeError("the judge is down")


async def crashes_later(**_):
    await asyncio.sleep(0)
    raise TimeoutError("the judge is slow")


def logs_wrongly(completions, log_metric, **_):
    log_metric("api/seconds", 1.0)
    return [0.0 for _ in completions]


def logs_a_text_as_column(log_extra, **_):
    log_extra("found", "ab")
    return [0.0, 0.0]


def logs_a_short_column(log_extra, **_):
    log_extra("found", [1])
    return [0.0, 0.0]


def logs_columns(completions, log_extra, **_):
    log_extra("array", np.array([1.5, 2.5]))
    log_extra("any", [{"a": [1, None]}, float("nan")])
    log_extra(
        "any_other",
        (
            {
                1,
            },
            np.int64(3),
        ),
    )
    return [0.0, None]


def logs_text(completions, log_metric, **_):
    log_metric("found", "two")
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crashes", r"crashes raised RuntimeError: the judge is down \(.*test_verifiers_functions.py:"),
        ("crashes_later", "crashes_later raised TimeoutError: the judge is slow"),
        ("by_epoch", "AttributeError: this trainer_state has global_step and max_steps, but no epoch"),
        ("logs_wrongly", "the metric 'api/seconds' has a name that the run uses itself"),
        ("logs_a_text_as_column", "the column 'found' is str, but it must be a list"),
        ("logs_a_short_column", "the column 'found' has 1 values for 2 completions"),
        ("logs_text", r"the metric 'found' is 'two' \(str\), but it must be a number"),
        ("scaled", r"raised TypeError: .*factor"),
    ],
)
def test_an_error_of_a_function_fails_all_its_answers_with_the_reason(name, reason):
    verdicts = scored(trl(name)).verdicts
    assert len(verdicts) == 2
    assert all(verdict.failed and verdict.score is None and re.search(reason, verdict.reason) for verdict in verdicts)


def test_columns_are_details_of_each_answer_as_json():
    """Of rows of other data sets, the function gets no answer and gives no value."""
    answers = [answer("a", dataset="x"), answer("b", dataset="y"), answer("c", dataset="x")]
    details = [verdict.details for verdict in scored(trl("logs_columns", datasets=["x"]), answers).verdicts]
    assert details == [
        {"logs_columns/array": 1.5, "logs_columns/any": {"a": [1, None]}, "logs_columns/any_other": "{1}"},
        {},
        {"logs_columns/array": 2.5, "logs_columns/any": "nan", "logs_columns/any_other": 3},
    ]


@pytest.mark.parametrize("name", ["record", "grades"])
def test_a_column_with_the_name_of_an_argument_fails_with_its_name(name):
    SEEN.clear()
    [verdict] = scored(trl(name), [answer("b", trainer_state="late")]).verdicts
    assert verdict.failed and "a column 'trainer_state', which is an argument of every reward" in verdict.reason
    assert not SEEN


# Several asynchronous functions

WAITING: list[str] = []


async def _meets(own: str, other: str, completions) -> list[float]:
    """Ends only if the other function runs at the same time."""
    WAITING.append(own)
    while other not in WAITING:
        await asyncio.sleep(0)
    return [1.0 for _ in completions]


async def first(completions, **kwargs):
    return await _meets("first", "second", completions)


async def second(completions, **kwargs):
    return await _meets("second", "first", completions)


async def never(**kwargs):
    await asyncio.Event().wait()


LOOPS: list[asyncio.AbstractEventLoop] = []


async def notes_its_loop(completions, **kwargs):
    LOOPS.append(asyncio.get_running_loop())
    return [0.0 for _ in completions]


def has_a_loop_of_its_own(completions, **kwargs):
    return asyncio.run(grades([], completions))


def test_asynchronous_functions_run_at_the_same_time():
    WAITING.clear()
    rewards = RewardSet([trl("first"), trl("boxed"), trl("second")], Letters(), "")
    assert rewards.calls == [[1], [0, 2]]
    given = rewards.score([0, 2], TWO, STATE)
    assert [[verdict.score for verdict in one.verdicts] for one in given] == [[1.0, 1.0], [1.0, 1.0]]


def test_a_time_out_of_one_asynchronous_function_leaves_the_others():
    rewards = RewardSet([trl("never", timeout_s=0.01), trl("grades"), trl("crashes_later")], Letters(), "")
    late, good, wrong = rewards.score([0, 1, 2], TWO, STATE)
    assert [verdict.score for verdict in good.verdicts] == [12.0, 7.0]
    assert late.verdicts == [Verdict(None, "never was not done in its timeout_s, 0.01 s", failed=True)] * 2
    assert all("the judge is slow" in verdict.reason for verdict in wrong.verdicts)


def test_an_asynchronous_function_stops_the_run_if_on_error_says_so():
    rewards = RewardSet([trl("grades"), trl("crashes_later", on_error="stop")], Letters(), "")
    with pytest.raises(ValueError, match="crashes_later, rows.jsonl:1"):
        rewards.score([0, 1], TWO, STATE)


def test_all_calls_share_one_event_loop():
    """A client of a service is bound to the loop that first used it."""
    LOOPS.clear()
    rewards = RewardSet([trl("notes_its_loop")], Letters(), "")
    for _ in range(2):
        rewards.score([0], TWO, STATE)
    assert len(LOOPS) == 2 and LOOPS[0] is LOOPS[1] and not LOOPS[0].is_closed()


def test_a_synchronous_function_may_run_a_loop_of_its_own():
    assert scores(trl("has_a_loop_of_its_own")) == [12.0, 7.0]


def test_rows_of_other_data_sets_are_not_given_to_a_function():
    answers = [answer("aa", dataset="x"), answer("b", dataset="y")]
    for name in ("grades", "has_a_loop_of_its_own"):
        cfg = trl(name, datasets=("y",))
        assert scores(cfg, answers) == [None, 1.0]
        assert scores(cfg, answers[:1]) == [None]


# Paths and arguments


def takes_two(completions, method="strict"):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math", "must read `package.module:function` or `folder/file.py:function`"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("json:no_such_function", "has no function 'no_such_function'"),
        ("json:__name__", "'__name__' is no function and no class, but an object of the type str"),
        ("no/such/file.py:f", "there is no file no/such/file.py"),
    ],
)
def test_a_wrong_path_is_named(path, message):
    with pytest.raises(ValueError, match=message):
        load_function(path)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("takes_two", {"metod": "strict"}, "takes_two' does not take 'metod', which its `arguments` give"),
        ("Counted", {"last": 1}, "Counted': its class raised TypeError: .*last"),
        ("NeedsMore", {}, "NeedsMore': its class raised TypeError: .*model"),
        ("GivesUp", {}, r"GivesUp': its class raised SystemExit: no licence \(.*functions.py:\d+\)"),
        ("InterruptsAtOnce", {}, r"its class raised KeyboardInterrupt \(.*test_verifiers_functions.py:\d+\)"),
        ("RaisesItsOwn", {}, r"its class raised .*Own: no licence \(.*test_verifiers_functions.py:\d+\)"),
        ("NotCallable", {}, "NotCallable': the class has no method __call__"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_any_answer(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        RewardSet([trl(name, arguments=arguments)], Letters(), "")


def test_a_function_of_a_file_is_loaded_once(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "calls = []\n@dataclass\nclass Grade:\n    value: float = 0.5\n"
        "def one(solution_str):\n    calls.append(1)\n    return Grade().value\n"
        "def number_of_calls():\n    return len(calls)\n"
    )
    monkeypatch.chdir(tmp_path)
    cfg = ComputeScoreReward(path="json.py:one").absolute()
    assert cfg.path == f"{tmp_path}/json.py:one" and cfg.label == "one"
    assert FunctionReward(path="package.module:one").absolute().path == "package.module:one"
    monkeypatch.chdir("/")
    assert scores(cfg) == [0.5, 0.5]
    assert load_function(f"{tmp_path}/json.py:number_of_calls")() == 2, "both functions share one module"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module\n", r"broken.py:f': No module named 'no_such_module'"),
        ("raise KeyboardInterrupt\n", r"broken.py:f': its module raised KeyboardInterrupt \(.*broken.py:1\)"),
        ("1 / 0\n", r"its module raised ZeroDivisionError: division by zero \(.*broken.py:1\)"),
        ("import sys\nsys.exit(2)\n", r"broken.py calls exit when it is imported; put .* under `if __name__ =="),
    ],
)
def test_a_file_that_cannot_be_run_is_named_each_time(tmp_path, source, message):
    (tmp_path / "broken.py").write_text(source)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            scores(trl("f", path=f"{tmp_path}/broken.py:f"))
