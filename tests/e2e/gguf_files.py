"""Writes tiny GGUF files of every kind, converts them, and says what became of each. It is run as a program, with the
packages gguf and accelerate on its path.

The values that a file stands for are computed here from its bytes, by the formulas of ggml (ggml-common.h,
ggml-quants.c): blocks of 32 values with scales in fp16.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, TokenType
from safetensors.torch import save_file

from megatron_rl.commands import gguf_to_hf

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, DIM = 64, 96, 2, 4, 2, 16
ALPHABET = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
MERGES = ["a b", "ab c", "Ġ a"]
TOKENS = ["<|end|>", "<|turn|>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
SPLIT_HALVES = ("attn_q", "attn_k")
"""A `llama` has the two halves of a head's dims in turn."""


def tensors(architecture: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The name in a Hugging Face folder and the extents of each tensor, by its name in GGUF."""
    found = {
        "token_embd.weight": ("model.embed_tokens.weight", (len(TOKENS), HIDDEN)),
        "output.weight": ("lm_head.weight", (len(TOKENS), HIDDEN)),
        "output_norm.weight": ("model.norm.weight", (HIDDEN,)),
    }
    for i in range(LAYERS):
        layer = {
            "attn_norm": ("input_layernorm", (HIDDEN,)),
            "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
            "attn_q": ("self_attn.q_proj", (HEADS * DIM, HIDDEN)),
            "attn_k": ("self_attn.k_proj", (KV_HEADS * DIM, HIDDEN)),
            "attn_v": ("self_attn.v_proj", (KV_HEADS * DIM, HIDDEN)),
            "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * DIM)),
            "ffn_gate": ("mlp.gate_proj", (FFN, HIDDEN)),
            "ffn_up": ("mlp.up_proj", (FFN, HIDDEN)),
            "ffn_down": ("mlp.down_proj", (HIDDEN, FFN)),
        }
        if architecture == "qwen3":
            layer |= {f"attn_{x}_norm": (f"self_attn.{x}_norm", (DIM,)) for x in "qk"}
        for name, (hf_name, extents) in layer.items():
            found[f"blk.{i}.{name}.weight"] = f"model.layers.{i}.{hf_name}.weight", extents
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                found[f"blk.{i}.{name}.bias"] = f"model.layers.{i}.{hf_name}.bias", extents[:1]
    return found


def meaning(raw: np.ndarray, kind: str) -> np.ndarray:
    """The values of a matrix's bytes, float32 [rows, columns]."""
    raw = np.ascontiguousarray(raw)
    rows = len(raw)
    if kind == "F32":
        return raw.view(np.float32).reshape(rows, -1)
    if kind == "F16":
        return raw.view(np.float16).astype(np.float32).reshape(rows, -1)
    if kind == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(rows, -1)
    num_bytes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
    blocks = raw.view(np.uint8).reshape(-1, num_bytes)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (blocks[:, 2:].view(np.int8) * scale).reshape(rows, -1)
    codes = blocks[:, num_bytes - 16 :]
    codes = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32)  # the first half in the low bits
    if kind == "Q4_0":
        return ((codes - 8) * scale).reshape(rows, -1)
    return (codes * scale + blocks[:, 2:4].copy().view(np.float16).astype(np.float32)).reshape(rows, -1)


def swapped(matrix: np.ndarray, parts: int) -> np.ndarray:
    """Rows of each head as [parts, DIM / parts], transposed."""
    return matrix.reshape(-1, parts, DIM // parts, matrix.shape[-1]).swapaxes(1, 2).reshape(matrix.shape)


def write(
    file: Path, architecture: str, kind: str, fields: dict | None = None, without: str = "", more: str = ""
) -> dict[str, torch.Tensor]:
    """Returns what the file stands for, by the names of a Hugging Face folder.

    Args:
        fields: further fields of text.
        without: the name of a tensor that is left out.
        more: the name of a tensor that no model has.
    """
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    if architecture == "llama":
        writer.add_rope_dimension_count(DIM)
    else:
        writer.add_key_length(DIM)
        writer.add_value_length(DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_chat_template("{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}")
    for name, text in (fields or {}).items():
        writer.add_string(name, text)
    expected = {}
    for name, (hf_name, extents) in tensors(architecture).items():
        values = random.standard_normal(extents).astype(np.float32)
        if name == without:
            continue
        if len(extents) == 1:
            writer.add_tensor(name, values)
            expected[hf_name] = torch.from_numpy(values)
            continue
        turned = architecture == "llama" and any(part in name for part in SPLIT_HALVES)
        raw = gguf.quants.quantize(swapped(values, 2) if turned else values, GGMLQuantizationType[kind])
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
        if kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
            known = meaning(raw, kind)
            expected[hf_name] = torch.from_numpy(swapped(known, DIM // 2) if turned else known).contiguous()
    if more:
        writer.add_tensor(more, np.ones(DIM // 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def converted(file: Path, target: Path, dtype: str = "float32") -> tuple[int, str]:
    """Exit status and output of the command."""
    text = StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        status = gguf_to_hf.main([str(file), str(target), "--dtype", dtype])
    return status, text.getvalue()


GOOD = [("llama", kind) for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")] + [
    ("qwen2", "Q4_1"),
    ("qwen3", "Q8_0"),
]
BAD = {
    "an unknown quantisation": dict(kind="Q5_0"),
    "an unknown architecture": dict(architecture="phi2"),
    "a scaling of positions": dict(fields={"llama.rope.scaling.type": "yarn"}),
    "frequencies": dict(more="rope_freqs.weight"),
    "too few tensors": dict(without="blk.1.ffn_up.weight"),
    "too many tensors": dict(more="blk.0.attn_gate.weight"),
}


def main(folder: Path) -> None:
    said = {}
    for architecture, kind in GOOD:
        name = f"{architecture}_{kind}"
        save_file(write(folder / f"{name}.gguf", architecture, kind), folder / f"{name}.safetensors")
        for dtype in ("float32", "bfloat16"):
            said[f"{name}_{dtype}"] = converted(folder / f"{name}.gguf", folder / f"{name}_{dtype}", dtype)
    for name, change in BAD.items():
        file = folder / f"{name}.gguf"
        write(file, **{"architecture": "llama", "kind": "Q8_0"} | change)
        said[name] = converted(file, folder / name)
    whole = folder / "llama_Q8_0.gguf"
    (folder / "cut.gguf").write_bytes(whole.read_bytes()[:9000])
    (folder / "text.gguf").write_text("no model")
    for name in ("cut", "text", "absent"):
        said[name] = converted(folder / f"{name}.gguf", folder / name)
    said["an existing target"] = converted(whole, folder / "llama_Q8_0_float32")
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
