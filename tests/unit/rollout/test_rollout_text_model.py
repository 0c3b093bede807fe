"""What an engine reads of a folder that holds a vision tower next to a text model."""

from __future__ import annotations

import json

from composites import Made

from megatron_rl.models import read_shape
from megatron_rl.rollout.start import text_model


def test_an_engine_reads_the_configuration_of_the_text_model(tmp_path):
    one = Made("kimi_k25", tmp_path)
    with text_model(one.folder) as folder:
        assert read_shape(folder) == read_shape(one.folder)
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["DeepseekV3ForCausalLM"] and "text_config" not in config
        assert (folder / "tokenizer.json").exists() and not [*folder.glob("*.safetensors")]
    assert not folder.exists()
    with text_model(one.alone) as folder:
        assert folder == one.alone
