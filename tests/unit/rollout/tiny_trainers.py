"""Tiny folders of Qwen3 and Qwen3-MoE, and trainer ranks without Megatron: real processes that hold shards of the
folders' weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import warm
from patience import deadline

from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.layout import Engines, Recording
from megatron_rl.models import read_shape, slices
from megatron_rl.models.shards import local_extents
from megatron_rl.types import Mesh, Metrics, ModelShape

CHARACTERS = "0123456789+=,? ."
SPECIAL = ["<pad>", "<eos>", "<think>", "</think>", "<unk>"]
NUM_TOKENS = len(SPECIAL) + len(CHARACTERS)
"""The tokens of the tokenizer. The model has more rows."""

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
"""What makes a model Qwen3-MoE. Rows of 96 are a multiple of what vLLM's kernel asks for on a CPU."""

NUM_LAYERS = 2
"""The layers of a model with a multi-token head, besides the head's."""
OF_HEAD = f"model.layers.{NUM_LAYERS}."
"""What the names of the head's tensors begin with."""


def write_model(folder: Path, seed: int, family: str = "Qwen3", num_tokens: int = NUM_TOKENS, **changes) -> Path:
    """A model with random weights that are large enough to make the distributions far from flat. Each character is a
    token."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    sizes = {
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
    config = getattr(transformers, f"{family}Config")(**(sizes | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1, 0.2) if parameter.ndim == 1 else parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    words = [*SPECIAL, *CHARACTERS, *(f"word {i}" for i in range(num_tokens - NUM_TOKENS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<think>", "</think>"],
    ).save_pretrained(folder)
    return folder


def write_with_head(folder: Path, seed: int) -> Path:
    """A GLM-4.5 of two layers with a mixture of experts, as it is published with a multi-token head. The embeddings are
    large, and the head passes that of the next token on, so its likeliest token is often the policy's."""
    import torch
    from safetensors.torch import load_file, save_file

    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    sizes |= {"moe_intermediate_size": 96, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
    sizes |= {"num_hidden_layers": NUM_LAYERS + 1, "use_qk_norm": True, "attention_bias": True}
    write_model(folder, seed, "Glm4Moe", **sizes)
    tensors, width = load_file(folder / "model.safetensors"), 64
    embedding, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedding *= 100
    for name in [
        one for one in tensors if one.startswith(OF_HEAD) and one.endswith(("o_proj.weight", "down_proj.weight"))
    ]:
        tensors[name] *= 0.1
    norms = {"enorm": torch.ones(width), "hnorm": torch.ones(width), "shared_head.norm": tensors["model.norm.weight"]}
    tensors |= {f"{OF_HEAD}{name}.weight": norm.clone() for name, norm in norms.items()}
    tensors[OF_HEAD + "eh_proj.weight"] = torch.cat((torch.eye(width), 0.01 * torch.randn(width, width)), 1)
    tensors |= {OF_HEAD + "embed_tokens.weight": embedding.clone(), OF_HEAD + "shared_head.head.weight": output.clone()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def serve(setup: BridgeSetup, rank: int, commands) -> None:
    """Run one trainer rank. It joins the bridge; then it obeys commands to push the weights of a folder, or to join
    again with another setup."""
    import torch
    from safetensors.torch import load_file

    from megatron_rl.bridge.sender import BridgeSender

    torch.set_num_threads(1)
    shards = setup.trainer_shards(rank)
    parameters = {name: torch.zeros(size) for name, size in local_extents(shards).items()}
    sender = BridgeSender(setup, rank, parameters)
    while (command := commands.recv()) is not None:
        if isinstance(command, BridgeSetup):
            sender.close()
            sender = BridgeSender(command, rank, parameters)
            continue
        folder, version = command
        weights = load_file(folder / "model.safetensors")
        for shard in shards:
            piece = weights[shard.hf_name][slices(shard.hf_box)]
            parameters[shard.local_name][slices(shard.local_box)] = piece
        try:
            commands.send(sender.push(version))
        except RuntimeError as error:
            commands.send(error)


class TinyTrainers:
    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        engines: Engines,
        dtype: str,
        shape: ModelShape | None = None,
        recorded: tuple[Recording, ...] = (),
    ) -> None:
        """
        Args:
            shape: what is pushed, if it is not the folder's model alone.
        """
        self._store = host_store("127.0.0.1")
        address = "127.0.0.1", self._store.port
        shape = shape or read_shape(folder)
        limits = dict(timeout_s=deadline(120), recorded=recorded)
        self.setup = BridgeSetup(shape, mesh, False, engines, dtype, *address, **limits)
        context = warm.context()
        self.processes, self._commands = [], []
        for rank in range(mesh.world_size):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=serve, args=(self.setup, rank, theirs), daemon=True))
            self.processes[-1].start()
            theirs.close()
            self._commands.append(ours)

    @property
    def info(self) -> dict:
        return {"setup": self.setup.as_dict(), "engine": 0}

    def rejoin(self, **changes) -> None:
        """Make all trainer ranks join the bridge again, with changes of the setup; the engine must do so too."""
        self.setup = replace(self.setup, epoch=self.setup.epoch + 1, **changes)
        for commands in self._commands:
            commands.send(self.setup)

    def begin_push(self, folder: Path, version: int) -> None:
        for commands in self._commands:
            commands.send((folder, version))

    def end_push(self) -> list[Metrics | RuntimeError]:
        return [commands.recv() for commands in self._commands]

    def close(self) -> None:
        for process, commands in zip(self.processes, self._commands, strict=True):
            process.kill()
            process.join()
            commands.close()
        self._store = None  # it serves as long as something refers to it
