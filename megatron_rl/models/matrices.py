"""Tells which parameters are matrices inside the layers. An optimizer may treat these apart from all others."""

from __future__ import annotations

from megatron_rl.models.rule import VALUE_HEAD
from megatron_rl.models.shards import is_vocabulary
from megatron_rl.types import TOWER

_HEADS = (VALUE_HEAD.megatron, VALUE_HEAD.hf[0].name)


def is_matrix(name: str, num_dims: int) -> bool:
    """Whether a tensor has two dims and is neither the embedding, the last layer, nor in a vision tower.

    Args:
        name: of a Hugging Face tensor, or the local name of a trainer's parameter.
        num_dims: of the tensor.
    """
    return num_dims == 2 and not is_vocabulary(name) and not name.endswith(_HEADS) and TOWER not in name
