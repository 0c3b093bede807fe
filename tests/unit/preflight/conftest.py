"""The working folder of a run that has no fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_home import CONFIG, safetensors, write_tokenizer

from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.preflight import devices


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A working folder with a whole tiny model in two shards, rows and a reward function."""
    monkeypatch.setattr(devices, "CPU_HEAD_DIMS", (*devices.CPU_HEAD_DIMS, 2))  # the model below has tiny heads
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    tensors = FAMILIES["qwen3"].hf_tensors(read_shape(model))
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for shard, held in shards.items():
        (model / shard).write_bytes(safetensors({name: tensors[name] for name in held}))
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(model)
    rows = [{"prompt": f"{i}+1=", "ground_truth": str(i + 1)} for i in range(9)]
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(
        "raise SystemExit('this module must not be run')\n"
        "def short(prompts, completions, completion_ids, **columns):\n    return [1.0 for _ in completions]\n"
    )
    return tmp_path
