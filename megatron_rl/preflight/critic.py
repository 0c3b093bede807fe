"""What is wrong with the critic of a run, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.actor.spec import check_trainable
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.models import FAMILIES, critic_shape, read_shape, scan
from megatron_rl.models.quantisation import check_unquantised
from megatron_rl.preflight.tokenizer_files import TokenizerFiles
from megatron_rl.types import ModelShape


def faults_of_critic(config: GrpoRunConfig, policy: ModelShape, tokenizer: TokenizerFiles | None) -> list[str]:
    """
    Args:
        policy: the sizes of the policy.
        tokenizer: the policy's; None if it cannot be read here.
    """
    try:
        return list(_faults(config, policy, tokenizer))
    except (ValueError, OSError) as error:
        return [str(error).replace("model.path", "critic.model.path").replace("policy.", "critic.")]


def _faults(config: GrpoRunConfig, policy: ModelShape, tokenizer: TokenizerFiles | None) -> Iterator[str]:
    critic = config.critic
    assert critic is not None, "the configuration has a critic"
    own = critic.model
    shape = policy if own is None else read_shape(own.path)
    FAMILIES[shape.family].check_mesh(critic_shape(shape), critic.parallel.mesh)
    check_trainable(shape, critic.trainer)
    if own is None:
        return
    if shape.max_positions < config.rollout.max_model_tokens:
        yield (
            f"critic.model: {own.path} has {shape.max_positions} positions, and an answer with its prompt may have "
            f"{config.rollout.max_model_tokens} tokens; lower rollout.max_response_tokens, or choose another critic"
        )
    if own.weights is None:
        check_unquantised(own.path)
        scan(own.path, shape)
    other = TokenizerFiles(own.path)
    if tokenizer is None or tokenizer.core is None or other.core is None:
        return
    ours, theirs = tokenizer.core.get_vocab(), other.core.get_vocab()
    if differing := sorted(ours.items() ^ theirs.items(), key=lambda pair: pair[1]):
        token, number = differing[0]
        yield (
            f"critic.model: the tokenizer of {own.path} is not that of {config.model.path}: only one of them has the "
            f"token {token!r} with the number {number}; a critic reads the policy's tokens, so choose one with the "
            "same tokenizer"
        )
