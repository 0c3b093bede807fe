"""The statements of this project's documents that something has not been run on a GPU, by the part of tools/gpu_day.py
that runs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """A line of this project's documents that says that something has not been run."""

    part: str
    """The part of PARTS that runs it, if it passes on a GPU."""
    file: str
    quote: str
    """The words of the line."""
    now: str
    """What of the line has run then, and what remains."""


LINES = (
    Line(
        "layouts",
        "README.md",
        "**every GPU path**: written, not run",
        "The trainer has run on one GPU with Megatron's own layers. Transformer Engine's layers, vLLM and several GPUs "
        "remain.",
    ),
    Line(
        "layouts",
        "megatron_rl/actor/README.md",
        "NCCL, Transformer Engine's layers and more than 4 ranks have not been run.",
        "NCCL has run with one rank. NCCL between ranks, Transformer Engine's layers and more than 4 ranks remain.",
    ),
    Line(
        "logprobs",
        "megatron_rl/algorithms/README.md",
        "It was not run on a GPU.",
        "It has run on a GPU, and nothing remains.",
    ),
    Line(
        "offload",
        "README.md",
        "moments in bf16 (`policy.optimizer.moments`) | on GPUs not run |",
        "The offloaded state has run on one GPU. Moments in bf16 remain.",
    ),
    Line(
        "layouts",
        "megatron_rl/actor/platform.py",
        "The CUDA path (NCCL, Transformer Engine's layers) has not been run.",
        "NCCL has run with one rank. NCCL between ranks and Transformer Engine's layers remain.",
    ),
    Line("offload", "megatron_rl/actor/streaming.py", "The CUDA path has not been run.", "It has run on one GPU."),
    Line(
        "offload",
        "megatron_rl/actor/README.md",
        "It has not been run on a GPU.",
        "It has run on one GPU.",
    ),
    Line("bridge", "megatron_rl/bridge/memory.py", "has not been run).", "CUDA IPC has run, without vLLM."),
    Line("bridge", "README.md", "| NCCL and CUDA IPC |", "CUDA IPC has run, without vLLM. NCCL remains."),
    Line(
        "bridge",
        "megatron_rl/bridge/README.md",
        "NCCL, CUDA IPC: not run.",
        "CUDA IPC has run, without vLLM. NCCL remains.",
    ),
    Line(
        "layers, recompute full",
        "recipes/olmo3_32b/RECORD.md",
        "on GPUs they have not run",
        "Megatron's own layers have run on a GPU in bf16, with Qwen3's norms. OLMo's norms and windows, and rows of "
        "34,816 tokens, remain.",
    ),
)
"""What the parts run of the documents' lists of what has not been run. The tests hold that the lines are there."""
