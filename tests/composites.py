"""Folders that transformers writes for models with a vision tower, and what their text models are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

TEXT = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=60,
    max_position_embeddings=128,
    pad_token_id=None,  # its embedding would have no gradient
)
DELTA = dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=8,
    rms_norm_eps=1e-3,  # a smaller one blows transformers' own rounding up
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
)
GATED = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=20)
LATENT = dict(
    model_type="deepseek_v3",
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    n_shared_experts=2,
)
TOWER = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, temporal_patch_size=1)
TOWER |= dict(out_hidden_size=32, num_position_embeddings=16, spatial_merge_size=2)
MOON = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=1, patch_size=4)
MOON |= dict(pos_emb_height=4, pos_emb_width=4)
SIGLIP = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
SIGLIP |= dict(image_size=28, patch_size=14)
WINDOWS = dict(head_dim=16, sliding_window=8, sliding_window_pattern=2, tie_word_embeddings=True)
SECTIONS = dict(
    head_dim=16,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False)
BIASED = dict(
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
)
WINDOWED = TOWER | dict(window_size=16, fullatt_block_indexes=[0])
DEEP = dict(deepstack_visual_indexes=[0])
MODELS = {
    "gemma3": ("Gemma3", "Gemma3", TEXT | WINDOWS, SIGLIP),
    "qwen2_5_vl": ("Qwen2_5_VL", "Qwen2", TEXT | BIASED, WINDOWED),
    "qwen3_vl": ("Qwen3VL", "Qwen3", TEXT | SECTIONS | {"tie_word_embeddings": True}, TOWER | DEEP),
    "qwen3_vl_moe": ("Qwen3VLMoe", "Qwen3Moe", TEXT | SECTIONS | EXPERTS, TOWER | DEEP),
    "qwen3_5": ("Qwen3_5", "Qwen3_5", TEXT | DELTA | {"tie_word_embeddings": True}, TOWER),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5Moe", TEXT | DELTA | GATED, TOWER),
    "kimi_k25": ("Kimi_K25", "DeepseekV3", TEXT | LATENT, MOON),
}
"""(the composite's classes, those of its text, the text's sizes, the tower's sizes)"""
OF_HEADS = ("qwen3_5", "qwen3_5_moe")
HEAD = {"mtp.fc.weight": (32, 64), "mtp.layers.0.mlp.experts.gate_up_proj": (4, 32, 32), "mtp.norm.weight": (32,)}
"""A part of Qwen3.5's multi-token head, which transformers reads over."""


class Made:
    """A composite of transformers, and what its text model is."""

    def __init__(self, name: str, root: Path) -> None:
        family, text, sizes, tower = MODELS[name]
        tied = sizes.get("tie_word_embeddings", False)
        config = getattr(transformers, f"{family}Config")(
            text_config=sizes, vision_config=tower, tie_word_embeddings=tied, dtype="float32"
        )
        torch.manual_seed(0)
        self.name, self.folder, self.alone = name, root / name, root / f"{name}_text"
        self.model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
        for tensor in self.model.state_dict().values():  # not the frequencies of the rotation
            tensor.normal_(0, 0.2)
        self.model.save_pretrained(self.folder)
        self.text = getattr(transformers, f"{text}ForCausalLM")(self.config_of_text(config)).eval()
        self.text.model.load_state_dict(self.model.model.language_model.state_dict())
        self.text.lm_head.load_state_dict(self.model.lm_head.state_dict())
        self.text.save_pretrained(self.alone)
        self.tensors = load_file(self.alone / "model.safetensors")
        (self.folder / "tokenizer.json").write_text("{}")
        (self.folder / "preprocessor_config.json").write_text("{}")
        path = self.folder / "config.json"
        fields = json.loads(path.read_text())
        if name == "kimi_k25":
            # transformers 5.19 writes `model.blocks` for the text's layers, which it does not read again.
            held = load_file(self.folder / "model.safetensors")
            other = {key: one for key, one in held.items() if not key.startswith("language_model.")}
            text = {f"language_model.{key}": one for key, one in self.tensors.items()}
            save_file(other | text, self.folder / "model.safetensors", metadata={"format": "pt"})
            again = type(self.model).from_pretrained(self.folder)  # it takes these names for the hub's
            assert all(map(torch.equal, self.model.state_dict().values(), again.state_dict().values()))
            # The hub's config.json calls it so; transformers does when it has read it.
            fields["text_config"] |= {"model_type": "kimi_k2", "auto_map": {"AutoModel": "modeling_deepseek.Model"}}
        elif name in OF_HEADS:
            fields["text_config"]["mtp_num_hidden_layers"] = 1
            self.head = {key: torch.randn(extents) for key, extents in HEAD.items()}
            save_file(self.head, self.folder / "more.safetensors")
        path.write_text(json.dumps(fields))

    def config_of_text(self, config):
        """Qwen2.5-VL's text model is a Qwen2.5, and Qwen3-VL's a Qwen3."""
        if "_vl" not in self.name:
            return config.text_config
        of_qwen3, fields = MODELS[self.name][1], config.text_config.to_dict()
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
        named = {"norm_topk_prob": True, "tie_word_embeddings": config.tie_word_embeddings}
        return getattr(transformers, f"{of_qwen3}Config")(
            **{k: v for k, v in fields.items() if k != "model_type"} | named
        )
