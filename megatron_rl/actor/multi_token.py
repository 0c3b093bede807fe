"""The multi-token head (DeepSeek-V3, arXiv:2412.19437, section 2.2), which predicts the token after the next one.

At position i the head reads the model's last hidden state, after the final norm, and the embedding of token i + 1:

    x_i = eh_proj [enorm(embedding(t_(i+1))) ; hnorm(hidden_i)],   y_i = norm(layer(x)_i),   logits_i = output y_i

where `layer` is one layer of the model's kind over the whole sequence, and the logits are for token i + 2. Hidden
states, embedding and output layer are the policy's and get no gradient from the head, so that the policy's gradient is
what it is without a head. A target is an action whose token before it is one as well: when an engine drafts, the token
before is the one that it has just sampled, so it never drafts the first token of an answer. The loss is the mean
cross-entropy over all targets of a mini-batch, at the sampling temperature. With `policy.multi_token_targets: policy`
it is the cross-entropy to the distribution p that the policy has at position i + 1, over its most probable tokens K:

    loss_i = - sum_(v in K) p_v / p(K) log softmax(logits_i)_v

The loss has no weight, because these parameters
have no other loss: Adam and Muon take the same steps with any factor, up to epsilon.

We do not use Megatron's `MultiTokenPredictionLayer`: it takes its targets from rows that it shifts on the device, and
its gradient flows into the policy. Megatron's names are kept, so that the parameters have the same places.

The bias of the head's router stays as it is loaded, and routing replay and auxiliary losses leave the head out, because
an engine tells no choices of experts for it. Invariants (tests/ranks): loss and gradient equal a float64 reference in
every layout; the policy's gradient has the same bits with a head and without.

Shape letters: T packed tokens of the row, t tokens that a rank has between the layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_rl.actor.agreement import sum_over_data_ranks
from megatron_rl.actor.attention import PackedSequences
from megatron_rl.actor.packing import Microbatch, targets_after_next
from megatron_rl.algorithms.objective import Metric


def add_head(gpt: GPTModel, layer: ModuleSpec, norm: ModuleSpec | type) -> None:
    """Give the last stage of a model a multi-token head.

    Args:
        layer: the spec of the head's layer.
        norm: the spec of its norms.
    """
    gpt.mtp = torch.nn.Module()
    gpt.mtp.layers = torch.nn.ModuleList([_HeadLayer(gpt.config, layer, norm, gpt.vp_stage)])
    for parameter in gpt.mtp.parameters():
        parameter.is_of_head = True
    if not gpt.pre_process:
        gpt.mtp.embedding = LanguageModelEmbedding(gpt.config, gpt.vocab_size, gpt.max_sequence_length, "none")
        gpt.mtp.embedding.requires_grad_(False)


class _HeadLayer(torch.nn.Module):
    def __init__(
        self, config: TransformerConfig, layer: ModuleSpec, norm: ModuleSpec | type, vp_stage: int | None
    ) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.enorm, self.hnorm, self.final_layernorm = (
            build_module(norm, config=config, hidden_size=width, eps=config.layernorm_epsilon) for _ in range(3)
        )
        # Every tensor-parallel rank has the matrix whole and multiplies its own tokens, so nothing is gathered.
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False, dtype=config.params_dtype)
        self.eh_proj.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # it is Megatron's
        number = config.num_layers + 1 - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(layer, config=config, layer_number=number, vp_stage=vp_stage)

    def forward(
        self, embedded_t1H: Tensor, hidden_t1H: Tensor, packed: PackedSequences, rotation: Tensor | None
    ) -> Tensor:
        """The normed output, [t, 1, H]."""
        both = torch.cat((self.enorm(embedded_t1H), self.hnorm(hidden_t1H)), -1)

        def layer(x_t1H: Tensor) -> Tensor:
            output: Tensor
            output, _ = self.transformer_layer(
                x_t1H, attention_mask=None, packed_seq_params=packed, rotary_pos_emb=rotation
            )
            return output

        x_t1H: Tensor = self.eh_proj(both)
        if self.config.recompute_granularity == "full":
            x_t1H = tensor_parallel.checkpoint(layer, False, x_t1H)
        else:
            x_t1H = layer(x_t1H)
        normed: Tensor = self.final_layernorm(x_t1H)
        return normed


def drafting_hidden(gpt: GPTModel, hidden_1TH: Tensor, next_T: Tensor, packed: PackedSequences) -> Tensor:
    """The head's hidden states, [T, H], whose products with the output layer are the logits.

    Args:
        hidden_1TH: the model's, after the final norm. They get no gradient.
        next_T: the next token of each; any token where there is none.
        packed: the row's plan.
    """
    with torch.no_grad():
        embedding = gpt.embedding if gpt.pre_process else gpt.mtp.embedding
        embedded_t1H = embedding(input_ids=next_T[None], position_ids=None)
    hidden_t1H = hidden_1TH.detach().transpose(0, 1)
    if gpt.config.sequence_parallel:
        group = parallel_state.get_tensor_model_parallel_group()
        hidden_t1H = hidden_t1H.chunk(group.size())[group.rank()]
    rotation = None
    if gpt.position_embedding_type == "rope":
        rotation = gpt.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True)
    normed_t1H = gpt.mtp.layers[0](embedded_t1H, hidden_t1H, packed, rotation)
    hidden_T1H: Tensor
    hidden_T1H, _ = gpt.output_layer(normed_t1H)
    return hidden_T1H[:, 0]


@dataclass
class HeadLoss:
    """The head's loss in one mini-batch."""

    num_targets: int
    """The number of the targets of all ranks."""
    num_likeliest: int
    """The size of K; 0: the targets are the sampled tokens."""
    reports: list[dict[str, Metric]] = field(default_factory=list)
    """The metrics of this rank's micro-batches, on the last stage:
        multi_token/loss: the mean cross-entropy of the targets, in nats.
        multi_token/accuracy: the share of the sampled tokens that have the largest logit."""

    @classmethod
    def of(cls, microbatches: Sequence[Microbatch], num_likeliest: int = 0) -> HeadLoss:
        """Count the targets of a mini-batch. Collective: all ranks call it."""
        number = torch.stack([targets_after_next(batch)[1].sum() for batch in microbatches]).sum()
        return cls(int(sum_over_data_ranks(number)), num_likeliest)

    def add(self, logp_T: Tensor, is_largest_T: Tensor) -> None:
        """
        Args:
            logp_T: the negated cross-entropy of each target of the whole row; 0 where there is none.
            is_largest_T: of the whole row; 0 where there is no target.
        """
        number = max(1, self.num_targets)
        loss, accuracy = -logp_T.detach().sum() / number, is_largest_T.sum() / number
        self.reports.append({"multi_token/loss": Metric(loss, "sum"), "multi_token/accuracy": Metric(accuracy, "sum")})


@torch.no_grad()
def copy_embedding(chunks: Sequence[torch.nn.Module]) -> None:
    """Send the embedding of the first stage to the last one, which has a copy for its head. Collective: all ranks call
    it, when the weights are whole."""
    if not parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
        return
    group = parallel_state.get_embedding_group()
    if group.size() == 1:
        return
    first, last = (unwrap_model(chunks[end]) for end in (0, -1))
    embedding = first.embedding if first.pre_process else last.mtp.embedding
    dist.broadcast(embedding.word_embeddings.weight.data, dist.get_process_group_ranks(group)[0], group=group)
