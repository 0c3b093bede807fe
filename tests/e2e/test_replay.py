"""Rollouts that one run writes are trained on by another, which has no engines."""

from __future__ import annotations

import numpy as np

from megatron_rl.data.saved_rollouts import read_step
from megatron_rl.observe.records import METRICS, read_lines

OF_ENGINES = ("sync/", "rollout/preempted")
TIMES = ("time/", "perf/", "memory/", "slowest_rank/")


def test_a_replay_computes_the_same_to_the_bit(recipe, task):
    common = ["recipes/grpo.py", "configs/run/tiny_grpo.yaml", f"model.path={task}/model", "data.eval=null"]
    common += [f"data.train={task}/train.jsonl", "run.steps=3", "rollout.prompts_per_step=8"]
    common += ["rewards=[{kind: function, path: 'rewards:share_of_digits'}]"]
    first = recipe.run(*common, "run.name=first", "rollout.dump=true")
    assert first.returncode == 0, first.stdout + first.stderr
    again = recipe.run(*common, "run.name=again", "rollout.replay=runs/first/rollouts")
    assert again.returncode == 0, again.stdout + again.stderr
    expected, given = (
        [
            {name: value for name, value in record.items() if not name.startswith(OF_ENGINES + TIMES)}
            for record in read_lines(recipe.folder / "runs" / name / METRICS)
        ]
        for name in ("first", "again")
    )
    assert given == expected and all(record["grad_norm"] > 0 for record in given[:3])
    models = [(recipe.folder / "runs" / name / "hf" / "model.safetensors").read_bytes() for name in ("first", "again")]
    assert models[0] == models[1]
    assert not (recipe.folder / "runs" / "again" / "logs" / "engine_0.log").exists()

    alone = recipe.run("tools/generate.py", *common[1:], "--steps", "1", "--out", "generated")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    one, other = (read_step(recipe.folder / path, 0) for path in ("generated", "runs/first/rollouts"))
    assert [group.prompt for group in one.groups] == [group.prompt for group in other.groups]
    pairs = [
        pair
        for group, same in zip(one.groups, other.groups, strict=True)
        for pair in zip(group.payload, same.payload, strict=True)
    ]
    equal = [(tokens, others) for tokens, others in pairs if tokens.ids.tolist() == others.ids.tolist()]
    # The engine's sums depend on what else is in its batch, so that a token may fall on the other side.
    assert len(equal) > 0.9 * len(pairs)
    for tokens, others in equal:
        np.testing.assert_allclose(tokens.logp_rollout, others.logp_rollout, atol=1e-5)  # a few ulps of numbers near 6
