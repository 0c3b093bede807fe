"""Faults of a teacher that would stop a run in its first minutes."""

from __future__ import annotations

import json
import shutil

import pytest
from run_home import CONFIG, VOCABULARY, faults, grpo, preflight, safetensors, write_tokenizer

from megatron_rl.models import FAMILIES, read_shape


def taught(by: str = "engine", **teacher):
    return grpo(algorithm={"distillation": {"by": by}}, teachers=[{"path": "teacher", **teacher}])


@pytest.fixture
def teacher(home):  # noqa: F811
    """A wider model's folder with the policy's tokenizer."""
    folder = home / "teacher"
    shutil.copytree(home / "model", folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 16}))
    tensors = FAMILIES["qwen3"].hf_tensors(read_shape(folder))
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def test_a_teacher_without_fault_passes(teacher):
    assert faults(taught()) == [] == faults(taught("trainer"))


def test_more_tokens_at_the_end_are_no_fault_and_the_first_other_token_is_named(teacher):
    write_tokenizer(teacher, [*VOCABULARY, "extra"])
    assert faults(taught()) == []
    write_tokenizer(teacher, [*VOCABULARY[:-2], "Y", "Z"])
    [fault] = faults(taught())
    number = len(VOCABULARY) - 2
    assert f"token {number} is {VOCABULARY[-2]!r} for the policy, and 'Y' for the teacher" in fault
    assert fault.startswith("teachers.0: the tokenizer of teacher is not that of model")


def test_too_few_positions_and_a_mesh_are_named(teacher):
    positions = grpo().rollout.max_model_tokens
    (teacher / "config.json").write_text(
        json.dumps({**CONFIG, "hidden_size": 16, "max_position_embeddings": positions})
    )
    assert faults(taught("trainer")) == []
    [fault] = faults(taught())
    assert f"has {positions} positions" in fault and f"an answer may have {positions + 1}" in fault
    [fault] = faults(taught(parallel={"tensor": 3}))
    assert fault.startswith("teachers.0: ") and "3" in fault


def test_a_row_without_its_teachers_prompt_and_a_data_set_without_rows_are_named(teacher):
    row = {"prompt": "1", "ground_truth": "1", "dataset": "a"}
    (teacher.parent / "train.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"hint": "1 1"}) + "\n")
    [fault] = faults(taught(prompt="hint"))
    assert fault.startswith("teachers.0.prompt names the column hint, which 1 of the rows") and "ground_truth" in fault
    notes: list[str] = []
    assert preflight(taught(prompt="hint", datasets=["b"]), notes.append) == [], "no row has this teacher"
    assert "teachers: no row that was checked has the `dataset` 'b', which `datasets` there names" in notes
