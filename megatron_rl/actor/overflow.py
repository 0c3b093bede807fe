"""Names where a number is not finite, for errors: the tensor of a gradient or a weight, or the layer of an activation.

float16 holds no number above 65,504, so a model that other types can train may overflow in it. Every function is a
collective: all ranks call it, and all get the same answer. Invariant (tests/ranks): in every layout they name the place
where the overflow was planted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_rl.actor import platform, state
from megatron_rl.actor.optimizer.norms import LARGEST_NORM, sum_of_squares
from megatron_rl.actor.packing import Microbatch
from megatron_rl.algorithms.objective import Metric
from megatron_rl.types import Metrics

if TYPE_CHECKING:
    from megatron_rl.actor.trainer import MegatronTrainer

OTHER_TYPE = "set model.dtype to bfloat16 or float32, which hold larger numbers"


def describe_gradients(trainer: MegatronTrainer, grad_norm: float, microbatches: Sequence[Microbatch]) -> str:
    """What is wrong with a gradient of this norm."""
    parameters: Iterator[tuple[str, Any]] = state.trained_parameters(trainer.chunks)
    broken = [name for name, p in parameters if not sum_of_squares([p.main_grad]) <= LARGEST_NORM**2]
    where = f"first in {broken[0]}" if broken else "in other ranks' parameters"
    names = [name for batch in microbatches for name in batch.names]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    problem = (
        f"the gradient norm is {grad_norm}, {where}, with the samples {', '.join(names[:3])}{more}; no weight was "
        f"changed. Look at the rewards and log-probs of these samples, or lower the learning rate"
    )
    if (scale := trainer.optimizer.loss_scale) is None:
        return problem
    # The backward pass begins at the end of the model, and what overflows there spreads to all layers before it.
    hub_names = _hub_names(trainer)
    found = trainer.agreement.gather([(_depth(name), name) for local in broken for name in hub_names[local]])
    name = max((one for of_rank in found for one in of_rank), default=(0, "a tensor"))[1]
    return f"gradients overflow float16 first in {name}, at the loss scale {scale.value:g}: {problem}, or {OTHER_TYPE}"


def reduce_or_locate(
    trainer: MegatronTrainer,
    reports: Sequence[dict[str, Metric]],
    problems: Sequence[str],
    microbatches: Sequence[Microbatch],
) -> Metrics:
    """`Agreement.reduce`. Of a model in float16 the error also names the first layer whose output is not finite."""
    try:
        return trainer.agreement.reduce(reports, problems)
    except ValueError as error:  # on all ranks
        if trainer.optimizer.loss_scale is None or not (where := _describe_activations(trainer, microbatches)):
            raise
        raise ValueError(f"{error}. {where}") from error


def _describe_activations(trainer: MegatronTrainer, microbatches: Sequence[Microbatch]) -> str:
    """The first layer whose output is not finite for these rows; "" if there is none."""
    found: list[int] = []
    modules = [unwrap_model(chunk) for chunk in trainer.chunks]
    num_layers = trainer.spec.shape.num_layers
    numbered = [(gpt.embedding, -1) for gpt in modules if gpt.pre_process]
    numbered += [(layer, layer.layer_number - 1) for gpt in modules for layer in gpt.decoder.layers]
    numbered += [(gpt.decoder.final_layernorm, num_layers) for gpt in modules if gpt.post_process]

    def look(number: int) -> Any:
        def hook(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if not torch.isfinite(output).all():
                found.append(number)

        return hook

    with ExitStack() as hooks, platform.running(), torch.no_grad():
        for module, number in numbered:
            hooks.callback(module.register_forward_hook(look(number)).remove)
        trainer.schedule.run(microbatches, lambda i, logp_T, *_: (logp_T.new_zeros(()), None), forward_only=True)
    first = min((number for of_rank in trainer.agreement.gather(found) for number in of_rank), default=None)
    if first is None:
        return ""
    where = {-1: "the embedding", num_layers: "the last norm"}.get(first, f"layer {first}")
    return f"In float16 the output of {where} is the first that is not finite: a number exceeds 65,504; {OTHER_TYPE}"


def require_finite_weights(trainer: MegatronTrainer) -> None:
    """
    Raises:
        ValueError: a weight of a model in float16 is not finite.
    """
    if trainer.optimizer.loss_scale is None:
        return
    hub_names = _hub_names(trainer)
    broken = [name for name, p in trainer.parameters().items() if not _is_finite(p)]
    trainer.agreement.require_none(
        [
            f"after the update {', '.join(hub_names[name])} has a weight above 65,504, the largest number of float16; "
            f"lower the learning rate, or {OTHER_TYPE}"
            for name in broken[:1]
        ]
    )


def _is_finite(weight: Tensor) -> bool:
    return weight.dtype != torch.float16 or bool(torch.isfinite(weight).all())


def _hub_names(trainer: MegatronTrainer) -> Mapping[str, list[str]]:
    """The names in the checkpoint of what each local parameter holds."""
    names: dict[str, list[str]] = {}
    for shard in trainer.shards:
        known = names.setdefault(shard.local_name, [])
        if shard.hf_name not in known:
            known.append(shard.hf_name)
    return names


def _depth(hub_name: str) -> float:
    """The place of a tensor between the embedding and the output layer, as a number that rises with the depth."""
    if layer := re.search(r"layers\.(\d+)\.", hub_name):
        return float(layer[1])
    return -1.0 if "embed_tokens" in hub_name else 1e9 if "lm_head" in hub_name else 1e6
