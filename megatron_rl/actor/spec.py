"""What a trainer is built from, and what it cannot train. It is not part of actor.py, so that the driver can use it
without importing Megatron-Core, and a dry run without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig, Switch
from megatron_rl.models import FAMILIES
from megatron_rl.types import Mixture, ModelShape

if TYPE_CHECKING:
    from megatron_rl.algorithms.objective import Objective

OF_MIXTURES = ("load_balancing_loss", "router_z_loss", "routing_replay")
"""The keys of `policy` that need a model with experts."""


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """What every trainer rank is built from. It is equal on all ranks.

    Raises:
        ValueError: the actor cannot train the model, or cannot split it in this way.
    """

    shape: ModelShape
    model: ModelConfig
    policy: PolicyConfig
    objective: Objective
    temperature: float
    """The sampling temperature; the logits are divided by it."""
    total_steps: int
    """The number of optimizer steps of the run, for the learning rate's schedule."""
    seed: int
    teacher: ModelConfig | None = None
    """The model whose log-probs the ranks compute (`Needs.teacher`); None: there is none."""
    top_k: int = 0
    """The number of tokens in a support (`algorithm.distillation.top_k`)."""
    forbidden: tuple[int, ...] = ()
    """The tokens that are never sampled (`rollout.sampling.forbid`), in ascending order."""
    pictures: str = ""
    """The folder of the run's images, if the model sees images (data/pictures.py)."""
    collective_timeout: timedelta = timedelta(minutes=10)
    """The longest time that a rank waits for others in a collective."""

    def __post_init__(self) -> None:
        check_trainable(self.shape, self.policy)

    @property
    def multi_token(self) -> Literal["drop", "keep", "train"]:
        """What becomes of the model's multi-token head. A critic has none."""
        return "drop" if self.shape.value_head else self.policy.multi_token

    @property
    def num_likeliest(self) -> int:
        """See `multi_token.HeadLoss`."""
        targets = min(32, self.shape.vocab_size - len(self.forbidden))
        return targets if self.policy.multi_token_targets == "policy" else 0


def check_trainable(shape: ModelShape, policy: PolicyConfig) -> None:
    """
    Raises:
        ValueError: the actor cannot train the model, or cannot split it in this way.
    """
    rate = policy.router_bias_update_rate
    if rate and not (shape.mixture and shape.mixture.router_bias):
        raise ValueError(
            f"policy.router_bias_update_rate is {rate}, but the routers of the family {shape.family} have no bias; "
            f"leave it out"
        )
    if policy.multi_token != "drop":
        _check_head(shape, policy)
    if policy.vision_tower == "trained" and shape.vision is None:
        raise ValueError(
            "policy.vision_tower is trained, but the model is trained as a text model, without a tower; leave it out"
        )
    if shape.mixture is None:
        for name in OF_MIXTURES:
            if value := getattr(policy, name):
                raise ValueError(f"policy.{name} is {value}, but the model has no experts; leave it out")
        return
    _check_experts(policy.parallel)
    _check_router(shape.mixture)
    if policy.routing_replay:
        _check_replay(policy.megatron.transformer)


def _check_head(shape: ModelShape, policy: PolicyConfig) -> None:
    """Refuse a multi-token head that the family does not have, or that the actor cannot train."""
    head = FAMILIES[shape.family].multi_token
    if head is None:
        raise ValueError(
            f"policy.multi_token is {policy.multi_token}, but models of the family {shape.family} have no multi-token "
            f"head; leave it out"
        )
    if policy.multi_token != "train":
        return
    if policy.lora:
        raise ValueError(
            "policy.multi_token is train, but policy.lora freezes the model's weights, and its checkpoints have no "
            "others; use keep, or leave policy.lora out"
        )


def _check_router(mixture: Mixture) -> None:
    """Refuse routers that Megatron computes in another way than transformers and vLLM."""
    if mixture.num_groups > 1 and mixture.num_active // mixture.num_active_groups != 2:
        raise ValueError(
            f"model.path: num_experts_per_tok is {mixture.num_active} and topk_group is {mixture.num_active_groups}; "
            f"the actor can only train models with a quotient of 2, because Megatron scores a group by its best "
            f"num_experts_per_tok / topk_group experts, but transformers and vLLM by its best two"
        )
    if mixture.score == "sigmoid" and mixture.normalised != (mixture.num_active > 1):
        raise ValueError(
            f"model.path: norm_topk_prob is {mixture.normalised} with {mixture.num_active} active experts, which the "
            f"actor cannot train: Megatron divides sigmoid scores by their sum if and only if there are several"
        )


def _check_replay(switches: Mapping[str, Switch]) -> None:
    """Refuse what the engine's choices cannot be replayed with.

    Args:
        switches: `policy.megatron.transformer`.
    """
    if switches.get("moe_router_fusion"):
        raise ValueError(
            "policy.routing_replay does not work with policy.megatron.transformer.moe_router_fusion, whose kernel "
            "makes its own choice; remove one of them"
        )
    modules = switches.get("recompute_modules")
    if isinstance(modules, str | tuple) and "moe" in modules:
        raise ValueError(
            "policy.megatron.transformer.recompute_modules has moe, with which Megatron computes a layer's experts "
            "again without its row, so that policy.routing_replay cannot replay the same choice; use model.recompute: "
            "full, or remove moe"
        )


def _check_experts(parallel: ParallelConfig) -> None:
    """Refuse settings that make Megatron fail late, or sum the experts' gradients over the wrong ranks."""
    mesh = parallel.mesh
    if mesh.tensor > 1 and not parallel.sequence:
        raise ValueError(
            f"policy.parallel.sequence must be true for a model with experts and tensor={mesh.tensor}: Megatron's "
            f"experts assume that the tensor-parallel ranks hold different tokens"
        )
    if mesh.expert == 1 and mesh.expert_ways != mesh.tensor:
        raise ValueError(
            f"policy.parallel.expert_tensor is {mesh.expert_ways} and policy.parallel.tensor is {mesh.tensor}; with "
            f"expert=1 they must be equal, or Megatron sums the experts' gradients over the wrong ranks. Leave "
            f"expert_tensor out"
        )
