"""Faults of a critic that would stop a run in its first minutes."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from run_home import CONFIG, VOCABULARY, faults, grpo, safetensors, write_tokenizer

from megatron_rl.commands.ppo import main
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import PpoRunConfig
from megatron_rl.models import FAMILIES, critic_config, critic_shape, read_shape
from megatron_rl.planning.memory import run_memory
from megatron_rl.planning.shapes import planned_shape

GAE = {"adv_estimator": {"kind": "gae"}}


def ppo(**critic):
    return grpo(algorithm=GAE, critic=critic)


@pytest.fixture
def other(home):  # noqa: F811
    """Another model's folder, with a value head."""
    folder = home / "other"
    shutil.copytree(home / "model", folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    config = critic_config({**CONFIG, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 16}, None)
    (folder / "config.json").write_text(json.dumps(config))
    shape = read_shape(folder)
    assert shape.value_head and shape == critic_shape(shape)
    (folder / "model.safetensors").write_bytes(safetensors(FAMILIES["qwen3"].hf_tensors(shape)))
    return folder


def test_a_critic_without_fault_passes(other):
    assert faults(ppo()) == []
    assert faults(ppo(model={"path": "other"}, parallel={"tensor": 2})) == []


def test_a_mesh_is_named_as_the_critics(other):
    [fault] = faults(ppo(parallel={"tensor": 3}))
    assert (
        fault == "the model has 4 attention heads, which critic.parallel.tensor=3 does not divide; it may be 1, 2 or 4"
    )


def test_another_tokenizer_is_refused(other):
    write_tokenizer(other, [*VOCABULARY[:-1], "Z"])
    [fault] = faults(ppo(model={"path": "other"}))
    assert "the tokenizer of other is not that of model: only one of them has the token" in fault
    assert "choose one with the same tokenizer" in fault


def test_too_few_positions_are_refused(other):
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 27}))
    [fault] = faults(ppo(model={"path": "other"}))
    assert "other has 27 positions, and an answer with its prompt may have 28 tokens" in fault


def test_weights_of_other_sizes_are_refused(other):
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 20}))
    [fault] = faults(ppo(model={"path": "other"}))
    assert "other/model.safetensors" in fault and "config.json asks for" in fault


def test_a_model_of_several_numbers_is_refused(other):
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    [fault] = faults(ppo(model={"path": "other"}))
    assert "the model gives 2 numbers (id2label)" in fault


def test_a_policy_that_writes_no_text_is_refused(other):
    found = faults(grpo(model={"path": "other", "dtype": "float32"}))
    assert any("other ends with one number in place of logits" in fault for fault in found)


SHIPPED = ["configs/model/qwen3_32b.yaml", "configs/cluster/h100_8n8g.yaml", "configs/run/gsm8k_32b.yaml"]


def test_the_dry_run_places_and_weighs_a_critic(capsys):
    layout = "critic.parallel={tensor: 4, pipeline: 2, data: 2}"
    status = main([*SHIPPED, "algorithm.adv_estimator={kind: gae}", layout, "--dry-run"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "qwen3, TP4 x PP2 x DP2 = 16 ranks" in out and "placement on 10 nodes" in out
    assert re.search(r"critic, stage 0 +│ +56\.16", out)


def test_a_critic_on_the_gpus_of_policy_and_engines_is_counted_in_each_phase(capsys):
    """A node of 8 GPUs: the critic's state is there in training alone, and the run needs no other GPU."""
    shared = "recipes/qwen3_8b/qwen3_8b-grpo-1n8g-shared-tp2cp2dp2.yaml"
    keys = [shared, "algorithm.adv_estimator={kind: gae}", "critic.parallel={tensor: 4, data: 2}"]
    keys.append("model.recompute=full")
    config = load_config(PpoRunConfig, keys)
    memory = run_memory(config, planned_shape(config))
    [gpu] = memory.gpus
    trainer, critic, engine = memory.trainer.totals, memory.critic.totals, memory.engine.gpu.totals
    assert gpu.totals == pytest.approx([sum(phase) for phase in zip(trainer, critic, engine, strict=True)])
    parts = [gpu.parts[f"critic: {part}"] for part in ("weights", "gradients", "optimizer state")]
    assert all(training > 0 == pushing == generating for training, pushing, generating in parts)
    assert gpu.name == "trainer, stage 0; critic, stage 0, and engine"
    assert main([*keys, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "placement on 1 node of 8 GPUs" in out and "8 of 8" in out
    lent = [line.split("│")[2:4] for line in out.splitlines() if "lent to the engines" in line]
    sides = [one.host["lent to the engines"] / 1e9 for one in (memory.trainer, memory.critic)]
    assert [[float(x) for x in row] for row in lent] == [pytest.approx([x, 8 * x], abs=0.006) for x in sides]
    many = load_config(PpoRunConfig, [*keys, "critic.parallel={tensor: 1, data: 8}", "model.recompute=none"])
    [problem] = run_memory(many, planned_shape(many)).problems
    assert "training needs" in problem and "are critic: " in problem and "critic.parallel.tensor" in problem


def test_a_critic_that_does_not_fit_is_refused_with_its_own_keys():
    keys = ["algorithm.adv_estimator={kind: gae}", "critic.parallel={tensor: 4, pipeline: 1, data: 2}"]
    config = load_config(PpoRunConfig, [*SHIPPED, *keys])
    memory = run_memory(config, planned_shape(config))
    [problem] = memory.problems
    assert "(critic, stage 0)" in problem and "raise critic.parallel.data, critic.parallel.tensor" in problem
    # A rank has a quarter of the model: 2 bytes of weights and 12 / DP2 bytes of optimizer state a parameter.
    held = FAMILIES["qwen3"].num_parameters(critic_shape(planned_shape(config))) / 4
    parts = {name: values[0] for name, values in memory.critic.parts.items()}
    assert parts["weights"] == pytest.approx(2 * held, rel=0.01)
    assert parts["optimizer state"] == pytest.approx(6 * held, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic": {}}, "grpo uses no critic; choose gae, or remove the section"),
        ({"algorithm": GAE}, "gae needs a critic; add the section critic"),
        ({"algorithm": GAE, "critic": {"warmup_steps": 3}}, "leaves none of the 3 run.steps for the policy"),
        (
            {"algorithm": GAE, "critic": {"parallel": {"data": 2}}, "cluster": {"colocate": True}},
            "there are 1 ranks of the policy (policy.parallel) and 2 of the critic (critic.parallel); make the",
        ),
        (
            {"algorithm": GAE, "critic": {}, "cluster": {"colocate": True, "pools": {"critic": "a"}}},
            "trainers and critic are on the same nodes, so cluster.pools must give both the same pool",
        ),
        (
            {
                "algorithm": GAE,
                "critic": {},
                "rollout__environment": {"kind": "class", "path": "games:Guess"},
                "rewards": [{"kind": "environment"}],
            },
            "they would count twice; set adv_estimator.weights to",
        ),
    ],
)
def test_what_does_not_fit(home, changes, message):  # noqa: F811
    with pytest.raises(ValueError, match=re.escape(message)):
        grpo(**changes)
