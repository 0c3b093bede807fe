"""The critic of PPO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from megatron_rl.config.optimizer import AdamConfig, AnyOptimizerConfig
from megatron_rl.config.policy import LoraConfig, MegatronConfig, ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.config.section import Section
from megatron_rl.config.value_loss import ValueLossConfig

if TYPE_CHECKING:
    from megatron_rl.config.algorithm import AlgorithmConfig
    from megatron_rl.config.schema import GrpoRunConfig


class CriticConfig(Section):
    """A second model, which predicts for each token the sum of future rewards, for `adv_estimator: {kind: gae}`. It has
    its own ranks, with the resources `cluster.cpus_per_trainer` and `cluster.gpus_per_trainer` for each. With
    `cluster.colocate` each shares the GPU of the policy rank with the same number."""

    model: ModelConfig | None = None
    """The model that initialises the critic; null means the policy's. A language model gets a value head of zeros. A
    model with one output, such as a reward model (`...ForSequenceClassification` with one label), keeps its head. Its
    tokenizer must be the policy's."""
    parallel: ParallelConfig = ParallelConfig()
    optimizer: AnyOptimizerConfig = AdamConfig(lr=1e-5)
    megatron: MegatronConfig = MegatronConfig()
    lora: LoraConfig | None = None
    """Adapters of a frozen model, which are trained with the value head. null: all weights are trained."""
    loss: ValueLossConfig = ValueLossConfig()
    updates_per_step: PositiveInt | None = None
    """The number of mini-batches of an epoch; each gives one optimizer step. null means `algorithm.updates_per_step`,
    the policy's number."""
    epochs: PositiveInt | None = None
    """The number of times that a step trains the critic on each of its samples, with the values of the step's start;
    null means `algorithm.epochs`, the policy's number. `algorithm.stop_epochs` does not stop the critic."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The number of first steps of the run that train only the critic."""

    @property
    def trainer(self) -> PolicyConfig:
        """The critic's parallelism and optimizer, as a policy's configuration."""
        return PolicyConfig(parallel=self.parallel, optimizer=self.optimizer, megatron=self.megatron, lora=self.lora)

    def updates_of(self, policy: AlgorithmConfig) -> tuple[int, int]:
        """The number of mini-batches of an epoch, and of epochs of a step."""
        return self.updates_per_step or policy.updates_per_step, self.epochs or policy.epochs

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        yield from self.optimizer.wider_gradients("critic", (self.model or run.model).dtype)
        estimator, cluster = run.algorithm.adv_estimator, run.cluster
        if "values" not in estimator.needs:
            yield f"critic: algorithm.adv_estimator {estimator.kind} uses no critic; choose gae, or remove the section"
        if self.warmup_steps >= run.run.steps:
            yield (
                f"critic.warmup_steps ({self.warmup_steps}) leaves none of the {run.run.steps} run.steps for the "
                "policy; lower it"
            )
        if run.rollout.prompts_per_step < (self.updates_per_step or 1):
            yield (
                f"critic.updates_per_step exceeds rollout.prompts_per_step ({self.updates_per_step} > "
                f"{run.rollout.prompts_per_step}), so some updates would be empty; lower it"
            )
        ranks, own = run.policy.parallel.mesh.world_size, self.parallel.mesh.world_size
        if cluster.colocate and own != ranks:
            yield (
                f"cluster.colocate: the critic has the GPUs of the policy, rank by rank, but there are {ranks} ranks "
                f"of the policy (policy.parallel) and {own} of the critic (critic.parallel); make the two numbers equal"
            )
        if cluster.colocate and cluster.pools.get("critic") != cluster.pools.get("trainer"):
            yield (
                "cluster.colocate: trainers and critic are on the same nodes, so cluster.pools must give both the "
                "same pool, or none"
            )
