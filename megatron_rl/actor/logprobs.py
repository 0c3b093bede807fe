"""The output layer without its matrix product. Megatron's model ends with hidden states. Log-probs and entropies are
computed from these in chunks (algorithms/logprobs.py), with the vocabulary split over the tensor-parallel ranks.

Invariant (tests/ranks): value and gradients equal log_softmax over the whole logits, for every split.

Shape letters: T packed tokens, V this rank's rows of the output layer, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_rl.actor.gradient_sum import copied_to_all_ranks
from megatron_rl.algorithms.logprobs import LowRank, VocabularyShard


class OutputLayer(ColumnParallelLinear):
    """Megatron's output layer with the same parameter (name, initialisation, attributes), but `forward` returns the
    input of the matrix product: the hidden states of all tokens of the row, [T, 1, H]. In the backward pass their
    gradients are summed over the tensor-parallel ranks."""

    low_rank: Callable[[], LowRank | None] = staticmethod(lambda: None)
    """Returns what an adapter adds to the weight."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        return copied_to_all_ranks(input_, self.tp_group), None


def output_weight(gpt: GPTModel) -> Tensor:
    """The output layer's weight, [V, H]; call it on the last pipeline stage. If it is tied, this is the embedding's
    weight or this stage's copy of it."""
    is_tied = gpt.share_embeddings_and_output_weights
    weight_VH: Tensor = gpt.shared_embedding_or_output_weight() if is_tied else gpt.output_layer.weight
    return weight_VH


def vocabulary_shard(
    weight_VH: Tensor, vocab_size: int, group: dist.ProcessGroup, forbidden: Sequence[int] = ()
) -> VocabularyShard:
    """This rank's part of the vocabulary. Rank r of the group holds the rows [r V, (r + 1) V) of the padded vocabulary.

    Args:
        forbidden: the tokens that are never sampled.
    """
    num_rows = len(weight_VH)

    def reduced(op: dist.ReduceOp.RedOpType) -> Callable[[Tensor], Tensor]:
        def reduce(x: Tensor) -> Tensor:
            dist.all_reduce(x, op=op, group=group)
            return x

        return reduce

    first = group.rank() * num_rows
    num_real = max(0, min(vocab_size - first, num_rows))
    columns = [token - first for token in forbidden if first <= token < first + num_real]
    return VocabularyShard(
        num_real=num_real,
        first=first,
        forbidden_F=torch.tensor(columns, device=weight_VH.device) if columns else None,
        num_ranks=group.size(),
        rank=group.rank(),
        max_over_ranks=reduced(dist.ReduceOp.MAX),
        sum_over_ranks=reduced(dist.ReduceOp.SUM),
    )
