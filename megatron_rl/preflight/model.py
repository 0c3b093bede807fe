"""What a model and the keys of a run say about each other, without rows, tokenizer or weights: for a run before it
starts, and for a plan of its memory."""

from __future__ import annotations

from megatron_rl.actor.spec import check_trainable
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, OfflineRunConfig
from megatron_rl.models import FAMILIES, obstacle_to_fused_layers
from megatron_rl.planning.activations import has_fused_layers
from megatron_rl.preflight.adapters import faults_of_adapters
from megatron_rl.preflight.devices import faults_of_engine
from megatron_rl.preflight.images import faults_of_images
from megatron_rl.types import ModelShape


def faults_of_model(config: BaseConfig, shape: ModelShape) -> list[str]:
    """
    Args:
        shape: of the policy's model, without adapters.
    """
    found = _positions(config, shape) + faults_of_adapters(config, shape) + faults_of_images(config, shape)
    return found + faults_of_engine(config, shape)


def faults_of_division(config: BaseConfig, shape: ModelShape) -> list[str]:
    """Why trainer or engine cannot split the model as configured; empty if they can."""
    try:
        _check_division(config, shape)
    except ValueError as error:
        return [str(error)]
    return []


def _check_division(config: BaseConfig, shape: ModelShape) -> None:
    """
    Raises:
        ValueError: see `faults_of_division`.
    """
    loss = config.preferences if isinstance(config, OfflineRunConfig) else None
    if shape.value_head and not (loss and loss.has_head):
        raise ValueError(
            f"model.path: {config.model.path} ends with one number in place of logits, as reward models and critics "
            "do, so it writes no text; give the folder of a model that does"
        )
    family = FAMILIES[shape.family]
    family.check_mesh(shape, config.policy.parallel.mesh)
    check_trainable(shape, config.policy)
    context, model = config.policy.parallel.context, config.model
    adapted = config.policy.adapted(shape)
    obstacle = obstacle_to_fused_layers(adapted, context)
    if config.cluster.gpus_per_trainer and model.layers == "transformer_engine" and obstacle:
        raise ValueError(f"model.layers is transformer_engine, but {obstacle}; set model.layers to local")
    if context > 1 and config.cluster.gpus_per_trainer and not has_fused_layers(adapted, model, context):
        raise ValueError(
            "policy.parallel.context above 1 needs Transformer Engine's layers on GPUs, but "
            + (obstacle or f"model.layers is {model.layers} and model.dtype {model.dtype}")
            + "; set policy.parallel.context to 1"
        )
    if isinstance(config, GrpoRunConfig):
        rollout = config.rollout
        family.check_engine(shape, rollout.parallel.tensor, rollout.parallel.expert_parallel, rollout.parallel.pipeline)


def _positions(config: BaseConfig, shape: ModelShape) -> list[str]:
    if isinstance(config, GrpoRunConfig):
        rollout, longest = config.rollout, config.rollout.max_engine_tokens
        keys = f"rollout.max_prompt_tokens ({rollout.max_prompt_tokens}) + rollout.max_response_tokens "
        keys += f"({rollout.max_response_tokens})"
        keys += " + rollout.prefix_values.forced_tokens" if longest > config.rollout.max_model_tokens else ""
    elif isinstance(config, OfflineRunConfig):
        longest, keys = config.offline.max_tokens, f"{config.section}.max_tokens"
    else:
        return []
    if longest <= shape.max_positions:
        return []
    return [
        f"{keys} = {longest} exceeds the {shape.max_positions} positions of {config.model.path} "
        f"(max_position_embeddings); lower {'one of them' if '+' in keys else 'it'}"
    ]
