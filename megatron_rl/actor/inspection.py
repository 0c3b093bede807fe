"""What single tokens have to do with a step, for `megatron-rl explain`: their numbers, and the gradients of their parts
of the loss.

A step's loss is a sum over tokens, each with its weight. So its derivative to a token's weight is what the token adds,
and the loss of some tokens alone is the loss with all other weights set to 0. Denominators, advantages and statistics
stay the step's. Invariant (tests/ranks): the parts' losses add up to the loss of the step, the gradient norm of the
whole step is the one of its update, and neither depends on the layout.

Shape letters: T packed tokens of a micro-batch, V this rank's rows of a vocabulary matrix, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.actor.moe.router import clear_auxiliary_losses
from megatron_rl.actor.optimizer.norms import sum_of_squares
from megatron_rl.actor.packing import Microbatch, by_sample
from megatron_rl.algorithms.columns import PackedColumns, with_support
from megatron_rl.models.shards import is_vocabulary
from megatron_rl.types import Gradient, TokenSpan

if TYPE_CHECKING:
    from megatron_rl.actor.actor import MegatronActor

NUM_ROWS = 8
"""The number of rows of each vocabulary matrix that are reported."""


def token_numbers(actor: MegatronActor, coefficients: Mapping[str, float]) -> dict[int, dict[str, np.ndarray]]:
    """The numbers of all tokens of the step that `begin` was given, under the weights at its start.

    Returns:
        By the sample's index in the step, float32 [L] each, 0 where there is no action: `logp`, the trainer's log-prob;
        `loss`, what the token adds to its mini-batch's loss; `slope`, the derivative of this loss to the log-prob;
        `entropy`, if the objective needs it; `advantage`, if the estimator gives each token its own. Only the rank that
        reports a replica's metrics has them.
    """
    found: dict[int, dict[str, np.ndarray]] = {}
    for index, microbatches in enumerate(actor.rows.minibatches):
        columns, denominators = actor.prepared(index), actor.rows.denominators[index]

        def look(i: int, logp_T: Tensor, entropy_T: Tensor | None, support_TK: Tensor | None) -> tuple[Tensor, None]:
            batch = microbatches[i]  # noqa: B023  # the pass ends before the next mini-batch
            if batch.names and actor.reports_metrics:
                own = with_support(columns[i], support_TK)  # noqa: B023
                given = own, denominators, coefficients  # noqa: B023
                numbers = _numbers(actor.spec.objective, logp_T, entropy_T, *given)
                for name, x_T in numbers.items():
                    for sample, values in by_sample(batch, torch.where(columns[i].action_mask_T, x_T, 0.0)).items():  # noqa: B023
                        found.setdefault(sample, {})[name] = values
            return logp_T.new_zeros(()), None

        with platform.running(), torch.no_grad():
            actor.schedule.run(microbatches, look, forward_only=True)
    return found


def _numbers(
    objective: Any,
    logp_T: Tensor,
    entropy_T: Tensor | None,
    columns: PackedColumns,
    denominators: Any,
    coefficients: Mapping[str, float],
) -> dict[str, Tensor]:
    with torch.enable_grad():
        logp, weight = logp_T.detach().requires_grad_(), columns.weight_T.detach().requires_grad_()
        loss, _ = objective(logp, entropy_T, replace(columns, weight_T=weight), denominators, coefficients)
        slope, added = torch.autograd.grad(loss, (logp, weight), allow_unused=True)
    zeros = torch.zeros_like(logp_T)
    numbers = {"logp": logp_T, "slope": zeros if slope is None else slope}
    numbers["loss"] = zeros if added is None else added * columns.weight_T
    if columns.reward_T is not None:
        numbers["advantage"] = columns.advantage_T
    return numbers if entropy_T is None else numbers | {"entropy": entropy_T}


def gradient_of(actor: MegatronActor, minibatch: int, part: TokenSpan, coefficients: Mapping[str, float]) -> Gradient:
    """The gradient of the loss of some tokens of a mini-batch alone, under the present weights. Collective: all ranks
    call it. No weight changes. The gradients of a mixture's auxiliary losses are not in it."""
    batches, columns = actor.rows.minibatches[minibatch], actor.prepared(minibatch)
    masks = [_tokens_of(part, batch) for batch in batches]
    own = [i for i, mask_T in enumerate(masks) if bool(mask_T.any())]
    # All ranks run the same number of rows, and virtual stages a multiple of the stages; a row whose weights are 0 adds
    # nothing.
    unit = actor.mesh.pipeline if actor.mesh.virtual > 1 else 1
    num_rows = -(-max(1, *actor.agreement.gather(len(own))) // unit) * unit
    rows = (own + [i for i in range(len(batches)) if i not in own])[:num_rows]
    chosen = [batches[i] for i in rows]

    def loss(k: int, logp_T: Tensor, entropy_T: Tensor | None, support_TK: Tensor | None) -> tuple[Tensor, None]:
        if not chosen[k].names:
            return logp_T.sum() * 0.0, None
        given = columns[rows[k]]
        weight_T = torch.where(masks[rows[k]], given.weight_T, 0.0)
        given = with_support(replace(given, weight_T=weight_T), support_TK)
        value, _ = actor.spec.objective(logp_T, entropy_T, given, actor.rows.denominators[minibatch], coefficients)
        return value, None

    clear_auxiliary_losses(actor.chunks)
    with platform.running():
        for chunk in actor.chunks:
            chunk.zero_grad_buffer()
        actor.optimizer.megatron.zero_grad()
        actor.schedule.run(chosen, loss)
        norm = actor.optimizer.gradient_norm()
    hub_names = {shard.local_name: shard.hf_name for shard in actor.shards}
    squares: dict[str, float] = {}
    rows_of: dict[str, dict[int, float]] = {}
    first = {shard.local_name: shard.hf_box[0][0] - shard.local_box[0][0] for shard in actor.shards}
    for name, start, gradient in actor.optimizer.gradients():
        group = group_of(name, hub_names[name])
        squares[group] = squares.get(group, 0.0) + float(sum_of_squares([gradient]))
        if is_vocabulary(name):
            width = actor.parameters()[name].shape[1]
            rows_of.setdefault(group, {}).update(_largest_rows(gradient, start, width, first[name]))
    gathered = actor.agreement.gather((squares, rows_of))
    return Gradient(norm, _added(one for one, _ in gathered), _merged([rows for _, rows in gathered]))


def _tokens_of(part: TokenSpan, batch: Microbatch) -> Tensor:
    """bool [T]: the positions that predict the part's tokens."""
    token_T = batch.columns.token_T
    samples = torch.tensor(part.samples, device=token_T.device)
    number_T = token_T & 0xFFFFFFFF
    mask_T: Tensor = torch.isin(token_T >> 32, samples) & (number_T >= part.start) & (number_T < part.stop)
    return mask_T & batch.columns.action_mask_T


EMBEDDING, OUTPUT = "embedding", "output layer"


def group_of(name: str, hub_name: str) -> str:
    """The part of the model that a parameter of Megatron belongs to.

    Args:
        hub_name: of one of its tensors, which has the number of the layer in the whole model.

    Example: `decoder.layers.0.self_attention.linear_qkv.weight` belongs to "layer 3 attention" if it holds
    `model.layers.3.self_attn.q_proj.weight`, and `decoder.final_layernorm.weight` to "norms".
    """
    kind = next((kind for key, kind in _KINDS.items() if key in name), "mlp")
    layer = re.search(r"layers\.(\d+)\.", hub_name)
    return f"layer {layer[1]} {kind}" if layer and kind != NORMS else kind


NORMS = "norms"
_KINDS = {
    **{"word_embeddings": EMBEDDING, "output_layer": OUTPUT, "value_head": OUTPUT, "norm": NORMS},
    **{"self_attention": "attention", "experts": "experts", "mlp.router": "router"},
}
"""Parts of Megatron's names -> what they are; the first counts."""


def _largest_rows(gradient: Tensor, start: int, width: int, first: int) -> dict[int, float]:
    """The squares of the largest rows of an interval of a matrix, by the token of the row.

    Args:
        first: the token of the matrix's row 0.
    """
    row_N = (torch.arange(start, start + len(gradient), device=gradient.device) // width).to(torch.int64)
    low = start // width
    squares_R = torch.zeros(int(row_N[-1]) - low + 1, dtype=torch.float64, device=gradient.device)
    squares_R.index_add_(0, row_N - low, gradient.double().square())
    values, indices = squares_R.topk(min(NUM_ROWS, len(squares_R)))
    pairs = zip(indices.tolist(), values.tolist(), strict=True)
    return {first + low + row: value for row, value in pairs if value > 0}


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _merged(parts: Sequence[Mapping[str, Mapping[int, float]]]) -> dict[str, dict[int, float]]:
    """The largest rows of each matrix over all ranks. A row at the end of a rank's interval is in two parts."""
    merged: dict[str, dict[int, float]] = {}
    for part in parts:
        for group, rows in part.items():
            known = merged.setdefault(group, {})
            for row, value in rows.items():
                known[row] = known.get(row, 0.0) + value
    return {g: dict(sorted(rows.items(), key=lambda row: -row[1])[:NUM_ROWS]) for g, rows in merged.items()}
