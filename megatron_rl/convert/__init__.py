"""Converts checkpoints between Hugging Face folders and Megatron-Core, without a GPU. See README.md."""

from __future__ import annotations

from megatron_rl.convert.conversion import Conversion, Options, to_hub, to_open, to_ranks
from megatron_rl.convert.forms import smallest_mesh
from megatron_rl.convert.source import Source, open_checkpoint
from megatron_rl.convert.verify import Verification, Verified
from megatron_rl.convert.work import Outcome, carry_out

__all__ = [
    "Conversion",
    "Options",
    "Outcome",
    "Source",
    "Verified",
    "carry_out",
    "open_checkpoint",
    "smallest_mesh",
    "to_hub",
    "to_open",
    "to_ranks",
    "Verification",
]
