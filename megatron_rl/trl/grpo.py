"""TRL's GRPOTrainer: Megatron trains, vLLM answers.

Invariant (tests/unit/trl, tests/doors): functions of the script reach the verifiers.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.trl.configuration import GRPOConfig
from megatron_rl.trl.environments import GivenEnvironments
from megatron_rl.trl.rewards import GivenRewards
from megatron_rl.trl.rows import joined, with_images
from megatron_rl.trl.sections import GivenGrpo
from megatron_rl.trl.trainer import REFUSED, RunTrainer


class GRPOTrainer(RunTrainer):
    """
    Args:
        model: a Hugging Face folder, the name of a model that is in the hub's cache, or a model of transformers or of
            PEFT.
        reward_funcs: functions, objects that can be called, or reward models with one label, as folders, names of the
            hub's cache or objects.
        train_dataset: a data set or a list of rows, with `prompt` as text or chat turns. Of an iterable one, the rows
            that the steps need.
        eval_dataset: in the same form, or a mapping of several, whose names are in the metrics.
        others: `processing_class`, the tokenizer in the place of the model's own; `reward_processing_classes`, the
            tokenizers of reward models; `callbacks` of transformers, which are called soon after what they are told;
            `tools`, functions that the model's turns call; `environment_factory`, what makes objects with such methods;
            `peft_config`, PEFT's LoraConfig, which becomes `policy.lora`.

    Raises:
        ValueError: an argument is not supported; the message has all of them and says what to do.
    """

    kind, config = "grpo", GRPOConfig
    refused = REFUSED | {
        "rollout_func": "it would have the weights of the script's process; rollout.environment in "
        "GRPOConfig(sections=...) names an agent, which calls the run's engines",
    }
    others = (
        *("processing_class", "reward_processing_classes", "callbacks", "tools", "peft_config"),
        "environment_factory",
    )

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **others: Any,
    ) -> None:
        faults = self._take(model, args, others)
        environments = faults.tried(lambda: GivenEnvironments(others.get("environment_factory"), others.get("tools")))
        own = () if environments is None else environments.rewards
        weights, classes = self.args and self.args.reward_weights, others.get("reward_processing_classes")
        rewards = faults.tried(lambda: GivenRewards(reward_funcs, weights, classes, own))
        self.train_dataset: Any = None
        if environments is not None and self.args is not None:
            self.train_dataset = faults.tried(lambda: environments.rows(train_dataset, self.args))
        self.eval_dataset = faults.tried(lambda: joined(eval_dataset))
        self._begin(faults, others)
        assert rewards is not None and environments is not None
        self._given_rewards, self._environments = rewards, environments

    @property
    def reward_funcs(self) -> list[Any]:
        return self._given_rewards.given

    def _rewards(self, folder: Path) -> Any:
        return self._given_rewards.entries(folder / "reward_models")

    def _other_rows(self, given: Any) -> Any:
        return list(joined(given) or ())

    def _given(self, train: Any, heldout: Any) -> GivenGrpo:
        train, heldout = (with_images(self._environments.complete(rows)) for rows in (train, heldout))
        return GivenGrpo(self.args, self._given_model, train, heldout, self._environments, self._lora)

    def _all_given(self) -> GivenGrpo:
        if not hasattr(self.train_dataset, "__len__"):
            if self.args.max_steps <= 0:
                raise ValueError("an iterable train_dataset has no length: give max_steps")
            prompts = self._given((), None).sizes.prompts
            self.train_dataset = list(islice(self.train_dataset, self.args.max_steps * prompts))
        if self.eval_dataset is not None and not hasattr(self.eval_dataset, "__len__"):
            self.eval_dataset = list(self.eval_dataset)
        return self._given(self.train_dataset, self.eval_dataset)
