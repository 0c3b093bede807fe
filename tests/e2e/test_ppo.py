"""PPO in the real loop: a critic on its own ranks learns beside the policy, and both go on from a checkpoint and after
a kill, also where policy, critic and engines share their machine's memory in phases."""

from __future__ import annotations

import json
import random
import shutil
import socket
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pytest import approx
from test_resume import NOT_COMPARED
from two_engines import of_two_engines

from megatron_rl.models import read_shape
from megatron_rl.observe.records import METRICS, read_lines

TRACED = 3
"""The step that is traced and profiled."""


@pytest.fixture
def port() -> int:
    """The port of the driver's endpoint. The next two, for the engines, are free, too. Systems give connections ports
    from 32768 on."""
    while True:
        with ExitStack() as servers:
            found = random.randrange(10000, 32000)
            try:
                for one in range(3):
                    servers.enter_context(socket.create_server(("", found + one)))
            except OSError:
                continue
            return found


def arguments(task, name: str, *more: str) -> list[str]:
    return [
        "ppo",
        "configs/run/tiny_ppo.yaml",
        f"run.name={name}",
        "run.steps=6",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        "data.eval=null",
        "rollout.prompts_per_step=16",
        "rollout.max_response_tokens=16",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "algorithm.updates_per_step=2",
        "algorithm.epochs=2",
        "algorithm.kl={estimator: k2, place: reward, coefficient: {kind: fixed, value: 0.05}}",
        "policy.parallel.data=2",
        "critic.parallel.tensor=2",
        "critic.updates_per_step=2",
        "critic.epochs=3",
        "critic.warmup_steps=1",
        "checkpoint.every=2",
        *more,
    ]


def metrics_of(folder) -> list[dict]:
    return [record for record in read_lines(folder / METRICS) if "critic/loss" in record]


AT_A_BOUND = ("tokens/untrained", "critic/clipfrac")
"""The first one begins with the process. The second one counts tokens beyond a bound, and the log-probs of two engines
round in another way."""


def check_same(records: list[dict], others: list[dict]) -> None:
    for first, second in zip(records, others, strict=True):
        for name, value in first.items():
            if not NOT_COMPARED.fullmatch(name) and name not in AT_A_BOUND:
                assert second[name] == value, name


def check_trace(path: Path, record: dict) -> None:
    """It has spans of every role, and the driver's phases add up to the step."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"].partition(" (")[0] for e in events if e["name"] == "process_name"}
    found: dict[str, set[str]] = {name: set() for name in names.values()}
    for event in events:
        assert event["ts"] >= 0 and event["dur"] >= 0
        if event["ph"] == "X":
            found[names[event["pid"]]].add(event["name"])
    trainers = [name for name in found if name.startswith("trainer")]
    assert set(found) == {"driver", *trainers, "critic rank 0", "critic rank 1", "engine 0", "verifier"}
    for name in trainers:
        assert found[name] >= {"begin", "update", "forward", "backward", "optimizer", "wait for all ranks", "push"}
    assert any(found[name] >= {"post", "wait for engine rank"} for name in trainers) and "score" in found["verifier"]
    assert found["critic rank 1"] >= {"values", "updates", "forward", "backward"}
    assert found["engine 0"] >= {"engine step", "request", "take weights", "commit weights"}
    driver = [event for event in events if event["pid"] == 1 and event.get("cat") == "phases"]
    [step] = [event for event in driver if event["name"] == f"step {TRACED}"]
    seconds = {name: sum(event["dur"] for event in driver if event["name"] == name) / 1e6 for name in found["driver"]}
    phases = {event["name"] for event in driver} - {step["name"]}
    assert phases >= {"sync", "generate", "update", "other"}
    assert sum(seconds[phase] for phase in phases) == approx(record["time/total_s"], rel=0.01)
    assert seconds["update"] == approx(record["time/update_s"], rel=0.01)
    inside = [event for event in events if event["ph"] == "X" and event["name"] in ("request", "forward")]
    assert all(step["ts"] <= event["ts"] <= step["ts"] + step["dur"] for event in inside), "one clock"


def check_machines(records: list[dict]) -> None:
    for record in records:
        for role in ("driver", "trainer", "critic", "engine", "verifier"):
            assert record[f"memory/{role}_resident_bytes"] > 10 << 20, role
        assert 0 <= record["machine/waiting"] < 1 and record["machine/trainer_cores"] > 0
        assert record["memory/object_store_bytes"] >= 0 and record["memory/shm_bytes"] > 0
        assert record["machine/disk_free_bytes"] > 0 and record["sync/transfer_s"] > 0


def check_endpoints(port: int) -> None:
    """The driver's and both engines' endpoints answer."""
    driver = samples(port)
    assert driver["megatron_rl_step"].labels == {"run": "lost"} and driver["megatron_rl_step"].value == 4
    assert (
        driver["megatron_rl_time_update_s"].value > 0 and driver["megatron_rl_memory_engine_resident_bytes"].value > 0
    )
    for engine in range(2):
        found = samples(port + 1 + engine)["vllm:generation_tokens_total"]
        assert found.labels["engine"] == str(engine) and found.value > 0


def samples(port: int) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {sample.name: sample for family in families for sample in family.samples}


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_critic_learns_beside_the_policy_and_both_go_on_to_the_bit(recipe, task, port):
    watched = f"{{kind: prometheus, port: {port}, engines: true}}"
    looked_at = f"{{kind: trace, steps: [{TRACED}]}}, {{kind: profile, steps: [{TRACED}], ranks: [1]}}"
    run = recipe.run(*arguments(task, "whole", f"observe=[{watched}, {looked_at}]"))
    assert run.returncode == 0, run.stdout + run.stderr
    runs = recipe.folder / "runs"
    whole = metrics_of(runs / "whole")
    assert [record["step"] for record in whole] == list(range(6))
    assert "loss" not in whole[0] and all(record["grad_norm"] > 0 for record in whole[1:])  # the critic's warm-up
    assert whole[0]["critic/value_mean"] == 0 and whole[1]["critic/value_mean"] != 0
    assert all(record["critic/grad_norm"] > 0 for record in whole)
    assert read_shape(runs / "whole" / "critic_hf").value_head
    assert sorted(path.name for path in (runs / "whole" / "checkpoints" / "critic").iterdir()) == [
        "step_000004",
        "step_000006",
    ]

    check_trace(runs / "whole" / "traces" / f"step_{TRACED:06}.json", whole[TRACED])
    assert "aten::" in (runs / "whole" / "profiles" / f"step_{TRACED:06}_trainer_1.json").read_text()
    check_machines(whole)

    # Another run goes on from step 4. Policy, critic and engines share their memory, and the critic is lost in step 5,
    # while the engines have it.
    shutil.copytree(runs / "whole", runs / "lost")
    (recipe.folder / "gate").touch()
    shared = ["cluster.colocate=true", "rollout.num_engines=2", f"observe=[{watched}]", "--resume", "4"]
    run = recipe.start(*arguments(task, "lost", *shared))
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    check_endpoints(port)
    recipe.process(run, "ray::CriticRank").kill()
    (recipe.folder / "gate").unlink()
    said = recipe.folder / "out.txt"
    assert run.wait(recipe.deadline_s) == 0, said.read_text()
    assert "Continuing with step 4" in said.read_text() and "was restarted" in said.read_text()
    lost = metrics_of(runs / "lost")
    assert lost[:4] == whole[:4] and lost[4:] != whole[4:], "two steps were done again, in other times"
    check_same(of_two_engines(whole[4:]), lost[4:])
    log = (runs / "lost" / "logs" / "critic_1.log").read_text()
    assert "entered the phase generating" in log and "entered the phase training" in log
