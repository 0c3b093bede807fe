"""A budget for each test file: the CPU seconds that it may take, processes of its tests included. (pytest plugin)

    make test ARGS="--write-costs=tests/budget.json"    # run a tier and write what its files took
    make test                                           # a file that takes more than twice its budget fails
    make test-deep ARGS="--shard 2/4"                   # the files of a shard: about a quarter of the tier's seconds

Seconds are those of the reference core of tests/patience.py, so a slow or a busy machine has the same budgets. What is
started once for many files (the server of tests/warm.py) belongs to none.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

import leaks
import pytest
import warm

BUDGET = Path(__file__).parent / "budget.json"
FACTOR = 2.0
"""Ranks that wait for each other spin, so a file with two of them took 1.95 times as much next to others."""
SMALLEST_S = {"pure": 5.0, "other": 15.0}
"""Budgets below these count as these: a file may be the first to import what later ones find imported, which is torch
in the pure rooms, and vLLM or Megatron-Core in the others."""
PROBE_S = 0.0225
"""What a sample of `slowness` takes on the reference core."""
PACE_S = 5.0
"""The time between two samples of `slowness`."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MODELS_OF_VLLM = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"), "modelinfos")
"""What vLLM knows of its models' classes. It looks at each class once on a machine, in a process of its own, for seven
CPU seconds."""
ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")
TIERS = {"not deep": "test", "deep": "deep"}


class Costs:
    """What this process and its descendants have used, file by file. A control group of their own also counts what was
    killed, as Ray ends its processes; without the right to make one, only what ended and was waited for is counted."""

    def __init__(self) -> None:
        self.of_file: dict[str, float] = {}
        self.group = own_group()
        self._pace = Pace()
        self._before = self.used()

    def close(self) -> None:
        if self.group:
            with suppress(OSError):  # a process is left in it
                (ACCOUNTS / "cgroup.procs").write_text(str(os.getpid()))
                self.group.rmdir()

    def end_file(self, name: str) -> None:
        used = self.used()
        spent, self._before = used - self._before, used
        self.of_file[name] = self.of_file.get(name, 0.0) + (spent / self._pace.mean() if spent > 1.0 else spent)
        self._before = self.used()

    def used(self) -> float:
        if self.group:
            own_of_server = (int(leaks.stat(pid)[i]) * TICK_S for pid in [warm.server_pid()] if pid for i in (11, 12))
            return int((self.group / "cpuacct.usage").read_text()) * 1e-9 - sum(own_of_server)
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        total = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        for pid, fields in leaks.family().items():
            own, of_ended_children = fields[11:13], fields[13:15]
            counted = of_ended_children if pid == warm.server_pid() else [*own, *of_ended_children]
            total += sum(map(int, counted)) * TICK_S
        return total


class Pace:
    """How many times slower than the reference core this one is, by a short loop of Python every few seconds. Other
    processes slow it down, those of the tests too, and when a file ends they have often ended already."""

    def __init__(self) -> None:
        self._samples = [slowness()]
        threading.Thread(target=self._sample, daemon=True, name="pace").start()

    def mean(self) -> float:
        """The mean since the last call."""
        samples, self._samples = [*self._samples, slowness()], []
        return statistics.fmean(samples)

    def _sample(self) -> None:
        while True:
            time.sleep(PACE_S)
            self._samples.append(slowness())


def slowness() -> float:
    """How many times slower than the reference core this one is now."""
    start = time.thread_time()
    sum(i * i % 7 for i in range(500_000))
    return max(1.0, (time.thread_time() - start) / PROBE_S)


def own_group() -> Path | None:
    """A new control group that this process is in (cgroup v1, as root), or None."""
    group = ACCOUNTS / f"megatron_rl_tests_{os.getpid()}"
    for old in ACCOUNTS.glob("megatron_rl_tests_*"):
        with suppress(OSError):  # it is in use
            old.rmdir()
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return None
    return group


_costs = pytest.StashKey[Costs]()
_all = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser):
    parser.addoption("--write-costs", metavar="FILE", help="write the CPU seconds of each file into a budget")
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N parts, 1 to N, of about equal budgets")


def pytest_configure(config):
    config.stash[_all] = {}
    if text := config.getoption("--shard"):
        index, slash, count = text.partition("/")
        if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
            raise pytest.UsageError(f"--shard {text}: write I/N, the I-th of N parts, with 1 <= I <= N")
    if (text := config.getoption("--write-costs")) and not Path(text).absolute().parent.is_dir():
        raise pytest.UsageError(f"--write-costs {text}: there is no folder for this file")


def pytest_sessionstart(session):
    session.config.stash[_costs] = Costs()
    session.config.stash[_cold] = not any(MODELS_OF_VLLM.glob("*"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    result = yield
    if nextitem is None or nextitem.path != item.path:
        item.config.stash[_costs].end_file(item.nodeid.partition("::")[0])
    return result


def pytest_sessionfinish(session):
    config = session.config
    costs = config.stash[_costs].of_file
    config.stash[_costs].close()
    if hasattr(config, "workeroutput"):
        config.workeroutput["costs"] = costs
        return
    config.stash[_all].update(costs)
    tier = tier_of(config)
    if target := config.getoption("--write-costs"):
        write(Path(target), tier or "all", config.stash[_all])
    elif not config.stash[_cold] and (budget := json.loads(BUDGET.read_text()).get(tier or "")):
        config.stash[_over] = over(config.stash[_all], budget)
        if config.stash[_over] and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


_over = pytest.StashKey[list[str]]()
_cold = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for name, seconds in getattr(node, "workeroutput", {}).get("costs", {}).items():
        total = node.config.stash[_all]
        total[name] = total.get(name, 0.0) + seconds


def pytest_terminal_summary(terminalreporter, config):
    costs = config.stash[_all]
    terminalreporter.write_line(f"{sum(costs.values()):.0f} CPU seconds in {len(costs)} files")
    if config.stash[_cold]:
        terminalreporter.write_line("vLLM has filled its cache, as on each new machine, so no budget was compared")
    for line in config.stash.get(_over, []):
        terminalreporter.write_line(line, red=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--shard"):
        return
    index, count = map(int, config.getoption("--shard").split("/"))
    budget = json.loads(BUDGET.read_text()).get(tier_of(config) or "", {})
    files = {item.nodeid.partition("::")[0] for item in items}
    if len(files) == 1:  # its tests, in their order
        mine = items[len(items) * (index - 1) // count : len(items) * index // count]
    else:
        chosen = shard(files, budget, index - 1, count)
        mine = [item for item in items if item.nodeid.partition("::")[0] in chosen]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


def shard(names: set[str], budget: dict[str, float], index: int, count: int) -> set[str]:
    """The files of one of `count` parts whose budgets are about equal: the largest file goes to the smallest part."""
    parts: list[tuple[float, set[str]]] = [(0.0, set()) for _ in range(count)]
    for name in sorted(names, key=lambda name: (-budget.get(name, 1.0), name)):
        smallest = min(range(count), key=lambda i: parts[i][0])
        seconds, part = parts[smallest]
        parts[smallest] = seconds + budget.get(name, 1.0), part | {name}
    return parts[index][1]


def tier_of(config) -> str | None:
    """The tier whose files run whole; None where somebody has chosen single tests."""
    chosen = config.getoption("keyword") or any("::" in argument for argument in config.args)
    return None if chosen or config.getoption("--all") else TIERS.get(config.getoption("markexpr"))


def over(costs: dict[str, float], budget: dict[str, float]) -> list[str]:
    """A sentence for each file that took too much, or that has no budget."""
    lines = []
    for name, seconds in sorted(costs.items()):
        smallest = SMALLEST_S["pure" if is_pure(name) else "other"]
        allowed = FACTOR * max(budget.get(name, 0.0), smallest)
        if seconds > allowed:
            lines.append(
                f"{name} took {seconds:.1f} CPU seconds, and its budget in tests/budget.json is"
                f" {budget.get(name, 0.0):.1f}: make it cheaper, mark what is dear and redundant as deep"
                " (tests/cover.py), or, if the new proof is worth it, write a new budget (tests/budget.py)"
            )
    return lines


def is_pure(name: str) -> bool:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    pure = next(line for line in makefile.splitlines() if line.startswith("pure := ")).split()[2:]
    return name.startswith(("tests/house/", *(f"tests/unit/{room}/" for room in pure)))


def write(target: Path, tier: str, costs: dict[str, float]) -> None:
    """Replace the budgets of the files that ran; the others stay, unless their file is gone."""
    known = json.loads(target.read_text()) if target.exists() else {}
    merged = known.get(tier, {}) | {name: round(seconds, 1) for name, seconds in costs.items()}
    root = Path(__file__).parents[1]
    known[tier] = {name: merged[name] for name in sorted(merged) if (root / name).exists()}
    target.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
