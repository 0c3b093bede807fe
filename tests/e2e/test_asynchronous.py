"""The real loop with engines that answer while it trains, with rows and rewards of TRL: an engine and then the whole
run are killed, and the resumed run, which has one engine, is stopped."""

from __future__ import annotations

import re
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import cover
import numpy as np
import psutil
import pytest

from megatron_rl.data.journal import read_journal
from megatron_rl.loop.checkpoints import find_checkpoints
from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.processes import descendants
from megatron_rl.rollout.progress import MAX_SAMPLES, ROW

MAX_LAG = 2
"""With 2 groups of 8 answers a step, each group is dealt to engines in two parts."""
ALONE = ["rollout.num_engines=1", "cluster.verifiers=1"]


def arguments(task: Path, steps: int) -> list[str]:
    return [
        "grpo",
        "configs/run/tiny_grpo.yaml",
        "run.name=stream",
        f"run.steps={steps}",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        "data.eval=null",
        "policy.parallel.tensor=1",
        f"rollout.max_lag={MAX_LAG}",
        "rollout.num_engines=2",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=8",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "cluster.verifiers=2",
        "checkpoint.every=10",
    ]


def metrics(folder: Path) -> list[dict]:
    return read_lines(folder / METRICS)


def writes(process: psutil.Process, path: Path) -> bool:
    with suppress(psutil.NoSuchProcess):
        return str(path) in {file.path for file in process.open_files()}
    return False


class Killer:
    """Kills engines while they generate, and keeps what their records held at that moment."""

    def __init__(self, recipe, run, folder: Path) -> None:
        self.recipe, self.run, self.folder = recipe, run, folder
        self.rows: dict[int, list[np.ndarray]] = {}
        """The rows of each answer, in the order in which engines have written them."""
        self.killed: set[Path] = set()
        self.kept = folder / "kept"
        """Links to all files that the journal has had. With each checkpoint the run removes those that it does not need
        any more. Ten steps lie between two checkpoints, so that a test without much of the CPU's time sees them all."""
        self.kept.mkdir(parents=True)

    def keep(self) -> None:
        for path in (self.folder / "journal").glob("*.groups"):
            with suppress(FileExistsError, FileNotFoundError):
                (self.kept / path.name).hardlink_to(path)

    def kill(self, index: int, num_rows: int) -> None:
        """Kill an engine once it has recorded so many tokens."""

        def busy() -> list[Path]:
            self.keep()
            records = set((self.folder / "unfinished").glob(f"engine_{index}_*.tokens")) - self.killed
            return [path for path in records if path.stat().st_size > num_rows * ROW.itemsize]

        self.recipe.wait_until(self.run, busy)
        [record] = busy()
        engine = next(process for process in descendants(psutil.Process(self.run.pid)) if writes(process, record))
        engine.suspend()
        rows = np.fromfile(record, ROW)
        engine.kill()
        self.killed.add(record)
        for answer in np.unique(rows["answer"]):
            self.rows.setdefault(int(answer), []).append(rows[rows["answer"] == answer])


def check_answers(killer: Killer, seen: dict) -> None:
    """What the dead engines had recorded is what the verified answers begin with."""
    for answer, parts in killer.rows.items():
        tokens, mine = seen[answer // MAX_SAMPLES].payload[answer % MAX_SAMPLES], np.concatenate(parts)
        actions = tokens.action_mask
        for name, column in (("token", tokens.ids), ("version", tokens.version), ("logp", tokens.logp_rollout)):
            assert column[actions][: len(mine)].tolist() == mine[name].tolist(), "no token was sampled again"


@pytest.mark.deep
@pytest.mark.deadline(900)
@pytest.mark.parametrize("num_kills", [1, 20] if cover.everything else [1])
def test_kills_cost_no_token_and_no_group(recipe, task, num_kills):
    folder, random = recipe.folder / "runs" / "stream", np.random.default_rng()
    run = recipe.start(*arguments(task, steps=1000), "cluster.restarts_per_hour=100")
    killer = Killer(recipe, run, folder)
    for _ in range(num_kills):
        killer.kill(int(random.integers(2)), int(random.integers(1, 2000)))
    groups = Counter(answer // MAX_SAMPLES for answer in killer.rows)
    assert num_kills > 1 or min(groups.values()) <= 4, "the other half of the group is on the other engine"

    steps: list[dict] = []

    def verified() -> bool:
        killer.keep()
        before, steps[:] = len(steps), metrics(folder)
        is_saved = bool(find_checkpoints(folder / "checkpoints"))  # they are written beside training
        return is_saved and len(steps) > max(before, 2) and groups.keys() <= read_journal(killer.kept).keys()

    recipe.wait_until(run, verified)
    for process in [psutil.Process(run.pid), *descendants(psutil.Process(run.pid))]:
        process.kill()
    run.wait()
    seen, before = read_journal(killer.kept), read_journal(folder / "journal")
    assert (folder / "logs" / "driver.log").read_text().count("is replaced") == num_kills
    check_answers(killer, seen)

    resumed_at = max(find_checkpoints(folder / "checkpoints"))
    command = [*arguments(task, 1000), *ALONE, "--resume", "auto"]
    num_steps = stop_while_rewards_are_computed(recipe, command, folder, num_more=4)
    records = metrics(folder)
    assert num_steps >= resumed_at + 4 and [record["step"] for record in records] == list(range(num_steps))
    for record in records:
        assert record["rollout/num_samples"] == 16 and np.isfinite(record["loss"])
        assert record.get("mismatch/mean_abs", 0) < 1e-4
    # Later steps may train on groups in the journal whose weights are lost: these count as those of the checkpoint.
    assert all(record["lag/max"] <= MAX_LAG + 1 for record in records[: resumed_at + 3])
    after = read_journal(folder / "journal")
    for number in before.keys() & after.keys():
        same = zip(before[number].payload, after[number].payload, strict=True)
        assert all(a.ids.tolist() == b.ids.tolist() for a, b in same), "what was verified is not generated again"
    assert not (folder / "unfinished").exists()


def stop_while_rewards_are_computed(recipe, command: list[str], folder: Path, num_more: int) -> int:
    """Resume a run and stop it after some more steps; returns how many steps it has done and saved. Threads of the
    driver wait inside Ray for the rewards. Ray's end under such a thread is a segmentation fault."""
    log, said = folder / "logs" / "trainer_0.log", recipe.folder / "out.txt"

    def num_updates() -> int:
        return log.read_text().count("update 0: ")

    num_before = num_updates()
    run = recipe.start(*command)
    recipe.wait_until(run, lambda: num_updates() >= num_before + num_more)
    (recipe.folder / "gate").touch()
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    run.send_signal(signal.SIGTERM)
    assert run.wait(recipe.deadline_s) == 143, said.read_text()
    assert "Traceback" not in said.read_text()
    [num_steps] = re.findall(r"Stopped after (\d+) of 1000 steps", said.read_text())
    assert max(find_checkpoints(folder / "checkpoints")) == int(num_steps)
    return int(num_steps)
