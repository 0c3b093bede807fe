"""Each item has exactly one verdict, in order, whatever the judge does to its process; and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from textwrap import dedent

import cover
import leaks
import psutil
import pytest
import told_judge
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import deadline
from told_judge import judge, scaled

from megatron_rl.processes import descendants, status_of
from megatron_rl.types import Verdict
from megatron_rl.verifiers.pool import Pool

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _workers_may_live() -> Iterator[None]:
    """A pool starts and replaces its workers in any test; they end with the pool, at the end of the module."""
    with leaks.lasting("module"):
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with closing(Pool(judge, 2, deadline(30))) as pool:
        yield pool


@pytest.fixture(scope="module")
def strict_pool() -> Iterator[Pool]:
    with closing(Pool(judge, 3, deadline(0.5))) as pool:
        yield pool


def failed(reason: str) -> Verdict:
    return Verdict(None, reason, failed=True)


def ended(how: str) -> Verdict:
    return failed(f"the process that judged the answer ended: {how}")


def wait_until_gone(ids: list[int]) -> None:
    end = time.monotonic() + deadline(30)
    while any(psutil.pid_exists(pid) for pid in ids):
        assert time.monotonic() < end, f"of the processes {ids} some are left"
        time.sleep(0.01)


def wait_until_ended(pid: int) -> None:
    """Wait for the end of a process that may remain as a zombie until the pool looks after it."""
    end = time.monotonic() + deadline(30)
    while psutil.pid_exists(pid) and status_of(psutil.Process(pid)) != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, f"the process {pid} has not ended"
        time.sleep(0.01)


# --- verdicts ---


def test_no_items(pool):
    assert pool.judge([]) == []


DEATHS = {
    ("exit", 3): "exit status 3",
    ("exit", 0): "exit status 0",
    ("signal", signal.SIGKILL): "SIGKILL",
    ("signal", 40): "signal 40",
}


@settings(max_examples=20)
@given(st.lists(st.one_of(st.integers(0, 99), st.sampled_from(list(DEATHS))), max_size=150))
def test_each_item_is_judged_once_and_a_death_costs_its_own_item_alone(tmp_path_factory, pool, items):
    path = tmp_path_factory.mktemp("judged") / "file"
    path.touch()
    verdicts = pool.judge([("file", str(path), item) if isinstance(item, int) else item for item in items])
    assert verdicts == [Verdict(item) if isinstance(item, int) else ended(DEATHS[item]) for item in items]
    assert sorted(map(int, path.read_text().split())) == sorted(item for item in items if isinstance(item, int))


def test_a_crash_in_c(pool):
    assert pool.judge([("score", 0.0), ("null pointer",), ("score", 1.0)]) == [
        Verdict(0.0),
        ended("SIGSEGV"),
        Verdict(1.0),
    ]


def test_an_exception_is_a_failed_verdict_with_its_place(pool):
    first, second, third, fourth = pool.judge([("raise", "no such word"), ("sys.exit", 0), ("other",), ("score", 0.5)])
    file = told_judge.__file__
    line = 1 + Path(file).read_text().split("\n").index("            raise LookupError(text)")
    assert first == failed(f"the judge raised LookupError: no such word ({file}:{line})")
    assert second.failed and second.reason.startswith("the judge raised SystemExit: 0 (")
    assert third.failed and "the judge must return a Verdict, but it returned str" in third.reason
    assert fourth == Verdict(0.5)


def test_large_items(pool):
    items = [("raise", character * 3_000_000) for character in "abc"]
    for (_, text), verdict in zip(items, pool.judge(items), strict=True):
        assert f"LookupError: {text} (" in verdict.reason


def test_calls_from_several_threads(pool):
    with ThreadPoolExecutor(4) as threads:
        calls = [[("score", float(100 * i + j)) for j in range(50)] for i in range(4)]
        for items, verdicts in zip(calls, threads.map(pool.judge, calls), strict=True):
            assert verdicts == [Verdict(value) for _, value in items]


def test_one_hung_item_holds_up_no_other_one(pool, tmp_path):
    path = str(tmp_path / "last")
    # The first item ends when the last one has been judged.
    items = [("wait for", path), *[("score", 2.0)] * 100, ("file", path, 3.0)]
    assert pool.judge(items) == [Verdict(1.0), *[Verdict(2.0)] * 100, Verdict(3.0)]


# --- deadlines ---


@pytest.mark.parametrize("hangs", cover.essential(["sleep", "loop", "loop in C"], "sleep"))
def test_a_hung_item_is_ended(strict_pool, hangs):
    late = failed(f"no verdict within {deadline(0.5):g} s")
    items = [(hangs,), ("score", 1.0), (hangs,), ("score", 2.0), (hangs,), ("score", 3.0)]
    assert strict_pool.judge(items) == [late, Verdict(1.0), late, Verdict(2.0), late, Verdict(3.0)]


@pytest.mark.parametrize("hangs", ["loop", "sleep"])
def test_an_item_that_computes_too_much_has_the_verdict_that_was_given_for_it(hangs):
    too_much = Verdict(0.0, "too much")
    late = too_much if hangs == "loop" else failed("no verdict within 0.2 s")
    with closing(Pool(judge, 1, 0.2, too_much)) as pool:
        assert pool.judge([("score", 1.0), (hangs,), ("score", 2.0)]) == [Verdict(1.0), late, Verdict(2.0)]


def test_what_lies_behind_a_hung_item_is_judged_by_another_worker(strict_pool):
    items = [("sleep",), *[("score", float(i)) for i in range(200)]]
    late = failed(f"no verdict within {deadline(0.5):g} s")
    assert strict_pool.judge(items) == [late, *[Verdict(value) for _, value in items[1:]]]


def test_the_time_of_an_item_begins_with_its_judgement():
    with closing(Pool(judge, 1, deadline(0.5))) as pool:
        assert pool.judge([("rest", 0.2)] * 6) == [Verdict(1.0)] * 6


def test_what_the_judge_has_started_ends_with_its_worker(pool, tmp_path):
    path = tmp_path / "ids"
    assert pool.judge([("descendants", str(path), ("exit", 4))]) == [ended("exit status 4")]
    ids = list(map(int, path.read_text().split()))
    assert len(ids) == 3 and not any(map(psutil.pid_exists, ids))


@pytest.mark.deep
def test_no_sandbox_outlives_its_worker():
    from megatron_rl.verifiers.sandbox.code import verify as verify_program
    from megatron_rl.verifiers.sandbox.process import Limits

    judge_program = partial(verify_program, truth=["assert f() == 1"], limits=Limits(cpu_s=100), score="all")
    before = {process.pid for process in descendants(psutil.Process())}
    with closing(Pool(judge_program, 1, 3.0)) as pool:
        hung, right = pool.judge(
            [f"```python\ndef f():\n    {text}\n```" for text in ("import time; time.sleep(1000)", "return 1")]
        )
        assert (hung, right) == (failed("no verdict within 3 s"), Verdict(1.0))
        left = [process for process in descendants(psutil.Process()) if process.pid not in before]
        assert len(left) == 2, "the fork server and its worker"


# --- processes ---


def test_a_worker_that_dies_between_two_calls_is_replaced(pool):
    [worker] = pool.judge([("worker",)])
    os.kill(int(worker.reward), signal.SIGKILL)
    wait_until_ended(int(worker.reward))
    first, *others = pool.judge([("worker",), *[("score", 1.0)] * 3])
    assert first.score and first.score != worker.score and others == [Verdict(1.0)] * 3


def test_a_fork_server_that_dies_is_replaced(pool):
    [server] = pool.judge([("fork server",)])
    workers = psutil.Process(int(server.reward)).children()
    os.kill(int(server.reward), signal.SIGKILL)
    for worker in workers:
        wait_until_ended(worker.pid)
    assert pool.judge([("score", 1.0)] * 3) == [Verdict(1.0)] * 3


def test_workers_ignore_sigint(pool):
    assert pool.judge([("signal", signal.SIGINT)]) == [Verdict(1.0)]


def test_workers_have_one_openmp_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    with closing(Pool(judge, 1, deadline(30))) as pool:
        assert pool.judge([("threads",)]) == [Verdict(1.0)]


def test_after_an_exception_in_the_caller_the_pool_can_be_used(pool):
    with pytest.raises(AttributeError, match="pickle"):
        pool.judge([("sleep",), lambda: "no pickle"])
    assert pool.judge([("score", 1.0)] * 4) == [Verdict(1.0)] * 4


def test_close_leaves_nothing():
    def state() -> tuple[set[int], list[str]]:
        return {process.pid for process in descendants(psutil.Process())}, sorted(os.listdir("/proc/self/fd"))

    before = state()
    pool = Pool(judge, 3, 0.5)
    pool.judge([("score", 1.0)] * 10 + [("sleep",), ("exit", 1)])
    assert len(state()[0] - before[0]) == 2, "the fork server, and the worker that is left"
    pool.close()
    assert state() == before
    pool.close()


SCRIPT = """
    import sys
    print("begin", flush=True)
    sys.path.insert(0, {folder!r})
    from told_judge import judge
    from megatron_rl.verifiers.pool import Pool

    def own(item):
        return item

    try:
        Pool(own, 1, 30.0)
    except ValueError as error:
        print(error, flush=True)
    pool = Pool(judge, 2, 1000.0)
    print([int(verdict.score) for verdict in pool.judge([("worker",), ("fork server",)])], flush=True)
    pool.judge([("descendants", {ids!r}, ("sleep",)), ("loop",)])
"""


def test_a_script_whose_processes_end_when_it_is_killed(tmp_path):
    ids, script = tmp_path / "ids", tmp_path / "script.py"
    script.write_text(dedent(SCRIPT).format(folder=str(Path(__file__).parent), ids=str(ids)))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert process.stdout is not None
    with process, process.stdout as output:
        try:
            assert output.readline() == "begin\n"
            fault = output.readline()
            assert "the judge must be importable" in fault and "own" in fault
            started = [int(word) for word in re.findall(r"\d+", output.readline())]
            assert len(started) == 2, "the script was not run again by a worker"
            end = time.monotonic() + deadline(60)
            while not (ids.exists() and len(ids.read_text().split()) == 3):
                assert time.monotonic() < end
                time.sleep(0.01)
            started += [child.pid for child in descendants(psutil.Process(process.pid))]
        finally:
            process.kill()
    wait_until_gone([*started, *map(int, ids.read_text().split())])


def test_a_judge_that_another_process_cannot_have_is_refused():
    with pytest.raises(ValueError, match="function of a module or a picklable object"):
        Pool(lambda item: Verdict(1.0), 1, 1.0)


def test_a_judge_that_is_a_partial_function():
    with closing(Pool(partial(scaled, factor=0.5), 2, deadline(60))) as pool:
        assert pool.judge([1.0, 2.0]) == [Verdict(0.5), Verdict(1.0)]
