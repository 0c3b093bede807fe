"""One pass of Megatron's pipeline schedule over packed micro-batches.

Megatron scales gradients in three places: the schedule divides by the number of micro-batches, DDP by DP, and
finalisation by a token count. With `calculate_per_token_loss` and a loss function that returns three values the first
two are off, and `finalize` below leaves out the third. The gradient is then exactly the sum over micro-batches and
data-parallel ranks. With context parallelism every rank of a group computes the loss of the whole row from the
log-probs of all its tokens, and takes the gradients of its own. Invariant (tests/ranks): the gradient depends neither
on the layout nor on the number of micro-batches.

Shape letters: T packed tokens, V this rank's rows of the output layer, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_rl import spans
from megatron_rl.actor import platform
from megatron_rl.actor.attention import PackedSequences, packed_sequences
from megatron_rl.actor.context import ContextRank
from megatron_rl.actor.logprobs import output_weight, vocabulary_shard
from megatron_rl.actor.multi_token import HeadLoss, drafting_hidden
from megatron_rl.actor.packing import Microbatch, RoutedRow, Routes, multiplicity, targets_after_next
from megatron_rl.actor.tower import SeenImages, Tower, beside
from megatron_rl.actor.value_head import values
from megatron_rl.algorithms.columns import FirstPass, support_of
from megatron_rl.algorithms.logprobs import Extra, VocabularyShard, draft_logprobs, token_logprobs
from megatron_rl.algorithms.top_logprobs import logprobs_at, top_tokens
from megatron_rl.types import ModelShape

# Megatron's schedules call it by this name; it runs the backward pass of one micro-batch.
schedules.backward_step = spans.spanned("backward", schedules.backward_step)

MicrobatchLoss = Callable[[int, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Any]]
"""(index of the micro-batch, logp_T, entropy_T, logp_support_TK) -> (the micro-batch's share of the loss, any result).
They are 0 where the target is not an action. entropy_T is None unless the schedule computes entropies, and
logp_support_TK unless the row has `support_T`. A critic has its values in the place of logp_T, which are not 0 there.
"""


def finalize(model: list[DistributedDataParallel], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Reduce the gradients over the groups as Megatron does, but without dividing by the number of tokens."""
    finalize_model_grads(model, None, **groups)


class Schedule:
    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        shape: ModelShape,
        temperature: float,
        also: Collection[Extra] = (),
        context: ContextRank | None = None,
        forbidden: Sequence[int] = (),
        tower: Tower | None = None,
    ):
        """
        Args:
            chunks: the rank's models, one for each virtual stage.
            also: what the passes compute besides log-probs. `energy` is only computed without gradients.
            context: the rank's place in its context group; None without context parallelism.
            forbidden: the tokens that are never sampled (`rollout.sampling.forbid`).
            tower: of a first pipeline stage whose model sees images.
        """
        self.chunks, self.shape, self.temperature, self.also = list(chunks), shape, temperature, also
        self.context, self._forbidden, self.tower = context, forbidden, tower
        self._vocabulary: VocabularyShard | None = None
        """This rank's part of the vocabulary, once a pass has needed it."""
        self.last = unwrap_model(self.chunks[-1])
        config = self.last.config
        self._in_two_bytes = config.bf16 or config.fp16
        config.finalize_model_grads_func = finalize
        no_sync = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.fused = config.transformer_impl == "transformer_engine"
        """Whether the layers are Transformer Engine's."""
        self._run = get_forward_backward_func()

    def run(
        self,
        microbatches: Sequence[Microbatch],
        loss: MicrobatchLoss | None,
        forward_only: bool = False,
        temperature: float | None = None,
        head_loss: HeadLoss | None = None,
        top: int = 0,
    ) -> list[Any]:
        """Run all micro-batches.

        Args:
            loss: None: there is no loss, and the results are a `FirstPass` each.
            top: see `top`; the results are then these tokens.
            temperature: for the log-probs; None means the schedule's own.
            head_loss: of the multi-token head, which is added to `loss` if it is given.

        Returns:
            The result that `loss` returned for each micro-batch, on the last pipeline stage; an empty list on others.
        """
        assert microbatches
        divisor = self.temperature if temperature is None else temperature

        def forward_step(
            indices: Iterator[int], model: DistributedDataParallel
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
            i = next(indices)
            batch = microbatches[i]
            # Hidden states keep their type, because the products with the output layer's rows run in it.
            extra: dict[str, Any] = {"fp32_output": False} if self._in_two_bytes else {}
            packed = packed_sequences(
                batch.lengths_S,
                self.shape,
                self.fused,
                self.context,
                batch.shared,
                varlen=platform.HAS_CUDA and self._in_two_bytes,
                position_3T=None if batch.images is None else batch.images.position_3T,
            )
            if self.shape.mixture is not None:
                packed.routed = self._routed(batch)
            with spans.span("forward", i):
                gpt, tower = unwrap_model(model), self.tower
                if tower and gpt.pre_process and (batch.images or tower.trained):
                    packed.images, extra["decoder_input"] = self._seen(batch, tower, gpt)
                output = model(
                    input_ids=self._part(batch.ids_T, batch)[None],
                    position_ids=None,
                    attention_mask=None,
                    packed_seq_params=packed,
                    **extra,
                )

            def calculate(hidden_1TH: Tensor) -> tuple[Tensor, Tensor, Any]:
                value = hidden_1TH.new_zeros(())
                result: Any
                if top:
                    result = self._top(hidden_1TH, batch, divisor, top)
                elif loss is None:
                    result = self._first_pass(hidden_1TH, batch, divisor)
                else:
                    value, result = self._calculate(i, hidden_1TH, batch, divisor, loss)
                if self.shape.multi_token and torch.is_grad_enabled():
                    value = value + self.head_share(hidden_1TH, batch, packed, divisor, head_loss)
                return value, torch.ones((), dtype=torch.int, device=platform.device()), result

            return output, calculate

        indices = [iter(range(len(microbatches))) for _ in self.chunks]
        results: list[Any] = self._run(
            forward_step_func=forward_step,
            data_iterator=indices if len(indices) > 1 else indices[0],
            model=self.chunks,
            num_microbatches=len(microbatches),
            seq_length=len(microbatches[0].ids_T),  # unused: lengths vary, so the stages exchange shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results

    def top(self, microbatches: Sequence[Microbatch], k: int) -> list[Tensor]:
        """int64 [T, k] of each micro-batch: the most probable tokens at each action, on the last pipeline stage; an
        empty list on others."""
        with platform.running(), torch.no_grad():
            return self.run(microbatches, None, forward_only=True, top=k)

    def _calculate(
        self, i: int, hidden_1TH: Tensor, batch: Microbatch, temperature: float, loss: MicrobatchLoss
    ) -> tuple[Tensor, Any]:
        numbers = self._first_pass(hidden_1TH, batch, temperature)
        token_TK = support_of(batch.columns)
        support_TK = None if token_TK is None else self._support(hidden_1TH, batch, token_TK.long(), temperature)
        return loss(i, numbers.logp_T, numbers.entropy_T, support_TK)

    def _vocabulary_of(self, weight_VH: Tensor) -> VocabularyShard:
        if self._vocabulary is None:
            group = parallel_state.get_tensor_model_parallel_group()
            self._vocabulary = vocabulary_shard(weight_VH, self.shape.vocab_size, group, self._forbidden)
        return self._vocabulary

    def _first_pass(self, hidden_1TH: Tensor, batch: Microbatch, temperature: float) -> FirstPass:
        """The numbers at all tokens of the row, of a critic its values in the place of log-probs."""
        if self.shape.value_head:
            found = FirstPass(values(hidden_1TH[0], self.last))
        else:
            weight_VH, vocabulary = self._output()
            found = token_logprobs(
                hidden_1TH[0],
                weight_VH,
                self._part(batch.target_T, batch),
                vocabulary,
                temperature=temperature,
                mask_T=self._part(batch.columns.action_mask_T, batch),
                also=[one for one in self.also if one == "entropy" or not torch.is_grad_enabled()],
            )
        if (context := self.context) is None:
            return found
        return found.each(lambda x_T: context.whole(x_T, batch.lengths_S))

    def _support(self, hidden_1TH: Tensor, batch: Microbatch, token_TK: Tensor, temperature: float) -> Tensor:
        """[T, K]: the log-probs of these tokens of the row."""
        weight_VH, vocabulary = self._output()
        token_TK = self._part(token_TK, batch)
        mask_T = self._part(batch.columns.action_mask_T, batch)
        logp_TK = logprobs_at(hidden_1TH[0], weight_VH, token_TK, vocabulary, temperature=temperature, mask_T=mask_T)
        return logp_TK if self.context is None else self.context.whole(logp_TK, batch.lengths_S)

    def _top(self, hidden_1TH: Tensor, batch: Microbatch, temperature: float, k: int) -> Tensor:
        """int64 [T, K]: the most probable tokens at each position."""
        weight_VH, vocabulary = self._output()
        mask_T = self._part(batch.columns.action_mask_T, batch)
        token_TK = top_tokens(hidden_1TH[0], weight_VH, vocabulary, temperature=temperature, mask_T=mask_T, k=k)
        return token_TK if self.context is None else self.context.whole(token_TK, batch.lengths_S)

    def _output(self) -> tuple[Tensor, VocabularyShard]:
        """The output layer's weight, and this rank's part of the vocabulary."""
        weight_VH = output_weight(self.last)
        return weight_VH, replace(self._vocabulary_of(weight_VH), low_rank=self.last.output_layer.low_rank())

    def head_share(
        self,
        hidden_1TH: Tensor,
        batch: Microbatch,
        packed: PackedSequences,
        temperature: float,
        head_loss: HeadLoss | None,
    ) -> Tensor:
        """The micro-batch's share of the loss of the multi-token head, from this rank's tokens. Without `head_loss` it
        is 0, so that every parameter still gets a gradient: the reduction over the ranks waits for all of them."""
        weight_VH = output_weight(self.last).detach()
        target_T, mask_T = targets_after_next(batch)
        drafting_TH = drafting_hidden(self.last, hidden_1TH, self._part(batch.target_T, batch), packed)
        vocabulary, given = self._vocabulary_of(weight_VH), {"temperature": temperature}
        mask_T = self._part(mask_T, batch)
        logp_T, is_largest_T = draft_logprobs(
            drafting_TH, weight_VH, self._part(target_T, batch), vocabulary, mask_T=mask_T, **given
        )
        if head_loss is None:
            return logp_T.sum() * 0.0
        if k := head_loss.num_likeliest:
            with torch.no_grad():
                token_TK = self._top(hidden_1TH, batch, temperature, k)
                share_TK = self._support(hidden_1TH, batch, token_TK, temperature).softmax(-1)
            token_TK, share_TK = (self._part(torch.roll(x, -1, 0), batch) for x in (token_TK, share_TK))
            logp_TK = logprobs_at(drafting_TH, weight_VH, token_TK, vocabulary, mask_T=mask_T, **given)
            logp_T = (share_TK * logp_TK).sum(-1)
        whole = logp_T.detach(), is_largest_T.float()
        if self.context is not None:
            whole = (self.context.whole(whole[0], batch.lengths_S), self.context.whole(whole[1], batch.lengths_S))
        head_loss.add(*whole)
        return -logp_T.sum() / max(1, head_loss.num_targets)

    def _routed(self, batch: Microbatch) -> RoutedRow:
        """What this rank's routers know of the tokens that they see."""
        routes = batch.routes
        known = routes and Routes(self._own(routes.expert_TLK, batch), self._own(routes.is_known_T, batch))
        return RoutedRow(self._own(multiplicity(batch), batch), known)

    def _seen(self, batch: Microbatch, tower: Tower, gpt: GPTModel) -> tuple[SeenImages | None, Tensor]:
        """What the tower computes for this rank's tokens, if the row has images, and their embeddings with it,
        [t, 1, H]."""
        embedded_t1H = gpt.embedding(input_ids=self._part(batch.ids_T, batch)[None], position_ids=None)
        if (images := batch.images) is None:
            return None, beside(embedded_t1H, tower.trained)[0]
        number_T = torch.full((len(batch.ids_T),), -1)
        number_T[images.index_M] = torch.arange(len(images.index_M))
        number_t = self._own(number_T, batch)
        index_I = (number_t >= 0).nonzero().squeeze(1).to(platform.device())
        mine_I = number_t[number_t >= 0].to(platform.device())
        embedding_IH, *deep = (whole_MH[mine_I] for whole_MH in tower.outputs(images.pictures))
        embedding_I1H = embedding_IH[:, None].to(embedded_t1H.dtype)
        input_t1H, copies = beside(embedded_t1H.index_copy(0, index_I, embedding_I1H), deep)
        return SeenImages(index_I, copies), input_t1H

    def _own(self, x_T: Tensor, batch: Microbatch) -> Tensor:
        """The values of the tokens that this rank's layers see between their linear ones."""
        group, x_T = parallel_state.get_tensor_model_parallel_group(), self._part(x_T, batch)
        return x_T.chunk(group.size())[group.rank()] if self.last.config.sequence_parallel else x_T

    def _part(self, x_T: Tensor, batch: Microbatch) -> Tensor:
        """The values of this rank's tokens."""
        return x_T if self.context is None else x_T[self.context.part(batch.lengths_S).to(x_T.device)]
