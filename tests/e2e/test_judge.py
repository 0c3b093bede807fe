"""The real loop with a judge that is down, slow or senseless, and with a reward whose process is lost: what could not
be scored is left out and counted, it is never a 0, and training goes on with the other rewards."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack

import pytest
from patience import deadline
from service_server import Served, serving

from megatron_rl.observe.records import METRICS, read_lines

STEPS = ("down", "good", "slow", "senseless", "good")
SENSELESS = (
    "quality: 4 out of 10",
    {"choices": []},
    {"choices": [{"message": {"content": "4"}}]},
    {"choices": [{"message": {"content": json.dumps({"quality": 4.5})}}]},
)
GOOD = {"choices": [{"message": {"content": json.dumps({"quality": 4})}}]}
WEIGHT = 0.1


class Judge:
    """Behaves as `STEPS` says. Before its first good step nothing listens at its port."""

    def __init__(self, servers: ExitStack) -> None:
        self._servers, self._step = servers, 0
        self._bound = servers.enter_context(socket.socket())
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._bound.bind(("127.0.0.1", 0))
        self.port = self._bound.getsockname()[1]
        self._served: Served | None = None

    def begin(self, step: int) -> None:
        self._step = step
        if self._served is None:
            self._bound.close()
            self._served = self._servers.enter_context(serving(self._reply, self.port))

    def _reply(self, body, earlier):
        assert self._served is not None
        if STEPS[self._step] == "slow":
            self._served.end.wait()
        if STEPS[self._step] == "senseless":
            return 200, SENSELESS[len(self._served.bodies) % len(SENSELESS)]
        return 200, GOOD


@pytest.mark.deep
def test_training_goes_on_without_the_judge(recipe, task):
    with ExitStack() as servers:
        judge = Judge(servers)

        def listen(body, earlier):
            if body["step"] < len(STEPS):
                judge.begin(body["step"])
            if body["step"] == len(STEPS) - 1:
                (recipe.folder / "hang").touch()
            return 200, "noted"

        listener = servers.enter_context(serving(listen))
        limits = f"attempts: 1, answer_timeout_s: {deadline(2)}, require_stop: false"
        rewards = [
            f"{{kind: judge, url: 'http://127.0.0.1:{judge.port}/v1', model: m, {limits}}}",
            f"{{kind: function, path: 'rewards:tells_the_step', arguments: {{listener: '{listener.url}'}}}}",
            f"{{kind: compute_score, path: 'rewards:stumbles', timeout_s: 8, weight: {WEIGHT}}}",
        ]
        run = recipe.run(
            "grpo",
            "configs/run/tiny_grpo.yaml",
            "run.name=judge",
            f"run.steps={len(STEPS)}",
            f"model.path={task}/model",
            f"data.train={task}/train.jsonl",
            "data.eval=null",
            "policy.parallel.tensor=1",
            "rollout.delimiter=''",
            "rollout.prompts_per_step=8",
            "rollout.samples_per_prompt=4",
            "rollout.max_sequences=4",  # a group finishes long before the last one
            "rollout.max_response_tokens=24",
            f"rewards=[{', '.join(rewards)}]",
            "checkpoint.every=0",
        )
    assert run.returncode == 0, run.stdout + run.stderr
    folder = recipe.folder / "runs" / "judge"
    records = list(read_lines(folder / METRICS))[: len(STEPS)]
    for record, behaviour in zip(records, STEPS, strict=True):
        assert record["grad_norm"] > 0 and record["reward/tells_the_step/abstained"] == 0
        stumbled = record["reward/stumbles/abstained"]
        others = record["reward/tells_the_step/mean"] + WEIGHT * (1 - stumbled)
        if behaviour == "good":
            assert record["reward/judge/failed"] == record["reward/judge/abstained"] == 0
            assert record["reward/judge/mean"] == pytest.approx((4 - 1) / (10 - 1))
            others += record["reward/judge/mean"]
        else:
            assert record["reward/judge/failed"] == record["reward/judge/abstained"] == 1
            assert "reward/judge/mean" not in record
        assert record["reward/mean"] == pytest.approx(others), "what a reward did not score is not in the sum"
    assert [record["reward/stumbles/failed"] for record in records[:-1]] == [0] * (len(STEPS) - 1)
    assert 0 < records[-1]["reward/stumbles/failed"] < 1, "only the groups of the call that was lost"
    assert [record["verifier/restarts"] for record in records] == [0, 0, 0, 0, 1]

    lines = [json.loads(line) for line in (folder / "logs" / "rewards.log").read_text().splitlines()]
    reasons = {line["step"]: line["error"] for line in lines if line.get("reward") == "judge" and "error" in line}
    assert "ConnectError" in reasons[0] and "no reply within answer_timeout_s" in reasons[2]
    assert "a reply that makes no sense" in reasons[3] and set(reasons) == {0, 2, 3}
    assert "reward judge could not score 100% of the answers; logs/rewards.log says why" in run.stdout + run.stderr
