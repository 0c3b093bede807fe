"""The value head of a critic, which takes the place of Megatron's output layer: one number for each token, the product
of its hidden state with a vector.

Every tensor-parallel rank has the whole vector and computes the values of all tokens. So all of them have the same
gradient of the hidden states, which is not summed over them. Invariant (tests/ranks): values and gradients equal
transformers' `AutoModelForSequenceClassification` at every token, for every layout.

Shape letters: T packed tokens, H hidden size.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


def add_value_head(gpt: GPTModel) -> None:
    """Give the last stage of a model a value head. The model then ends with hidden states."""
    config = gpt.config
    gpt.output_layer = _HiddenStates(config.sequence_parallel, gpt.pg_collection.tp)
    gpt.value_head = _ValueHead(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
    torch.nn.init.zeros_(gpt.value_head.weight)


def values(hidden_TH: Tensor, gpt: GPTModel) -> Tensor:
    """The value at each token, float32 [T]."""
    value_T: Tensor = gpt.value_head(hidden_TH)
    return value_T


class _ValueHead(torch.nn.Linear):
    """It is a module, because `overlap_param_gather` gathers the parameters of a module before its forward pass."""

    def forward(self, hidden_TH: Tensor) -> Tensor:
        # bf16 has two digits, so the product is in float32.
        return torch.mv(hidden_TH.float(), self.weight[0].float())


class _HiddenStates(torch.nn.Module):
    """An output layer that returns the hidden states of all tokens of the row, [T, 1, H]."""

    def __init__(self, sequence_parallel: bool, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel, self.tp_group = sequence_parallel, group

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            # Every rank computes the same loss from all tokens, so each keeps the gradient of its own tokens.
            return gather_from_sequence_parallel_region(input_, False, group=self.tp_group), None
        return input_, None
