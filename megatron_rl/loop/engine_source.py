"""The rollouts that engines generate.

`admission.py` decides which groups run and which ones a step takes. This module asks for the prompts, holds the groups,
and gives their state to a checkpoint. `kind_of_source` chooses once what depends on the kind of run.

Invariants (tests/unit/loop, tests/e2e): a resumed run requests the unfinished groups again, with their own prompts,
unless the journal has them; the groups of a step that the trainer interrupted are trained on again and not generated
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import Journal, NoJournal
from megatron_rl.loop.active_sampling import ActiveSampling
from megatron_rl.loop.admission import Admission
from megatron_rl.loop.budgets import ThoughtBudgets
from megatron_rl.loop.checkpoints import due, find_checkpoints
from megatron_rl.loop.evaluation import describe_heldout
from megatron_rl.loop.generation_metrics import NUM_HELD, GenerationMetrics
from megatron_rl.loop.health.answers import StepWarnings, describe_unscored
from megatron_rl.loop.rollouts import describe_verified, rewards_of
from megatron_rl.loop.source import Prompts
from megatron_rl.loop.stopping import Stopping
from megatron_rl.loop.untrained_groups import AsideGroups, Asked
from megatron_rl.ports import Ports, Sink
from megatron_rl.types import Group, GroupRequest, Metrics, Prompt, Rollouts

STEPS = 2**20
"""The seeds of the steps of one `run.seed`. The last one is for all evaluations, so that their accuracies can be
compared."""


class EngineSource:
    """The source of an asynchronous run: engines answer prompts of later steps while the trainer trains."""

    _open_journal = Journal

    def __init__(self, config: GrpoRunConfig, ports: Ports, prompts: Prompts, sink: Sink, stopping: Stopping) -> None:
        self._config, self._ports, self._sink, self._stopping = config, ports, sink, stopping
        self._prompts, self._heldout, rollout = prompts.train, prompts.heldout, config.rollout
        self._admission = Admission(rollout.prompts_per_step, rollout.max_lag, rollout.late == "wait")
        self._sampling = ActiveSampling(config, prompts.train)
        self._journal = self._open_journal(config.run_folder / "journal", rollout.max_lag)
        self._warnings = StepWarnings(config)
        self._budgets = ThoughtBudgets(config)
        self._given: dict[int, tuple[int, ...]] = {}
        """The thinking budgets of the requested groups that are not complete, by their numbers: a repeated request has
        the same budgets."""
        self._groups: dict[int, Group] = {}
        """The ready groups, and the groups that the last NUM_HELD steps have taken."""
        self._taken: dict[int, list[int]] = {}
        """The numbers of the groups that a step has taken."""
        self._again: list[int] = []
        """The groups that are requested again at the next push: groups of a checkpoint, and late ones."""
        self._aside, self._measured = AsideGroups(ports.stream), GenerationMetrics(rollout.num_engines)
        self._version = self._step = 0

    def pushed(self, version: int) -> None:
        """See `RolloutSource`."""
        self._version, num_steps = version, self._config.run.steps
        if self._heldout and (version in (0, num_steps) or due(version, self._config.eval.every)):
            self._evaluate()
        if version == num_steps:
            return
        self._journal.prune(max(find_checkpoints(self._config.run_folder / "checkpoints"), default=0))
        known = {*self._admission.running, *self._admission.ready, *self._again}
        self._given = {number: budgets for number, budgets in self._given.items() if number in known}
        self._refill()

    def next(self, step: int) -> Rollouts:
        with self._stopping.promptly():
            with self._sink.phase("generate"):
                while (taken := self._admission.take(step)) is None:
                    if not self._refill():
                        self._collect()
            groups = [self._groups[number] for number in taken]
            self._step = step + 1
            self._hold(step, taken)
            self._budgets.record(groups)
            num_late = self._give_up_late(step)
            metrics = describe_verified(self._config, groups) | self._measured.of_step(step)
            metrics |= self._describe_lag(groups, step, num_late)
            self._warnings.count(groups, metrics, self._sink)
            return Rollouts(groups, self._greedy_rewards(groups, step), metrics)

    def _greedy_rewards(self, groups: Sequence[Group], step: int) -> np.ndarray | None:
        """float64: the reward of the greedy answer to each sample's prompt, if the estimator needs it."""
        if "greedy_reward" not in self._config.algorithm.adv_estimator.needs:
            return None
        with self._sink.phase("generate"):
            prompts = [group.prompt for group in groups]
            seed = self._config.run.seed * STEPS + step
            baselines = self._aside.ask(prompts, 1, self._version, seed, is_greedy=True)
            self._wait_for(baselines)
        greedy = [group for group in baselines.values() if group is not None]
        return np.repeat(rewards_of(greedy), [len(group.rollouts) for group in groups])

    def _wait_for(self, groups: Asked) -> None:
        """Wait until all groups are there."""
        while None in groups.values():
            self._collect()

    def _evaluate(self) -> None:
        """Ask for the held-out prompts. They are answered together with the training prompts, while the step trains."""
        num_samples = self._config.eval.samples_per_prompt
        self._aside.evaluation = self._aside.ask(self._heldout, num_samples, self._version, STEPS - 1, is_greedy=False)

    def evaluated(self) -> Metrics:
        """See `RolloutSource`. If the run is asked to stop, the evaluation is given up, with a warning."""
        with self._sink.phase("evaluate"):
            while None in self._aside.evaluation.values() and not self._stopping():
                self._collect()
        groups, self._aside.evaluation = self._aside.evaluation, {}
        finished = [group for group in groups.values() if group is not None]
        if len(finished) < len(groups):
            self._sink.warn(
                f"the run stops, and of the evaluation only {len(finished)} of {len(groups)} prompts are done"
            )
            return {}
        if not finished:
            return {}
        if unscored := describe_unscored(finished):
            raise ValueError(f"the evaluation: {unscored}")
        return describe_heldout(self._config, finished)

    def state(self) -> dict[str, Any]:
        waiting = sorted([*self._admission.running, *self._admission.ready, *self._again])
        return self._prompts.state() | {
            "waiting": waiting,
            "step": self._step,
            "thoughts": self._budgets.state(),
            "thought_budgets": [[n, list(self._given[n])] for n in waiting if n in self._given],
            "pass_rates": self._sampling.pass_rates.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: the state belongs to other data.
        """
        position = self._prompts.position
        self._prompts.restore(state)
        self._step = state["step"]
        waiting = [*state.get("waiting", []), *self._keep(self._step, position)]
        self._journal.resume(self._step)
        self._aside.cancel_evaluation()
        self._sampling.pass_rates.restore(state.get("pass_rates", {}))
        self._budgets.restore(state.get("thoughts", []))
        self._given |= {number: tuple(budgets) for number, budgets in state.get("thought_budgets", [])}
        known = {*self._admission.running, *self._admission.ready, *self._again}
        for number in [number for number in waiting if number not in known]:
            if number in self._groups:
                self._admission.put_back(number, self._groups[number].version)
            else:
                self._again.append(number)

    def _keep(self, step: int, position: int) -> Sequence[int]:
        """The numbers of more groups than the state has, which are kept after the policy was lost. The engines still
        work on younger groups, so the stream of prompts does not go back behind them, but to its old `position`."""
        self._prompts.position = max(position, self._prompts.position)
        return []

    def _refill(self) -> bool:
        """Request the groups that must be requested again, and as many others as there is room for. Returns whether
        there was any; groups of the journal are ready at once."""
        again, self._again = self._again, []
        requests = [self._admit(number, self._prompts.item(number)) for number in again]
        asked = self._sampling.draw(self._admission.room(self._config.run.steps - self._version), self._journal.unused)
        requests += [self._admit(number, prompt) for number, prompt in asked]
        if requests := [request for request in requests if request is not None]:
            self._ports.stream.ask(requests, self._version)
        return bool(asked)

    def _admit(self, number: int, prompt: Prompt) -> GroupRequest | None:
        """What is asked for a group; None if it is in the journal, and so ready."""
        if (group := self._journal.take(number, prompt, self._version)) is not None:
            self._admission.admit(number, group.version)
            self._finish(number, group)
            return None
        self._admission.admit(number, self._version)
        if number not in self._given:
            self._given[number] = self._budgets.give(prompt, number, self._version).thought_budgets
        prompt, rollout = replace(prompt, thought_budgets=self._given[number]), self._config.rollout
        step, index = divmod(number, rollout.prompts_per_step)
        return GroupRequest(number, prompt, rollout.samples_per_prompt, (self._config.run.seed * STEPS + step, index))

    def _collect(self) -> None:
        verified = self._ports.stream.collect(self._version)
        self._measured.count(verified)
        for number, group in verified.groups.items():
            if not self._aside.take(number, group):
                self._finish(number, group)
        self._sampling.require_a_signal()

    def _finish(self, number: int, group: Group) -> None:
        if self._admission.finish(number, self._sampling.accepts(number, group, self._admission.useless_batches)):
            self._groups[number] = group

    def _give_up_late(self, step: int) -> int:
        """Stop the generation of the groups that this step has given up. Returns their number."""
        late, self._admission.late = self._admission.late, []
        for number in late:
            self._ports.stream.cancel(number)
        if self._config.rollout.late == "requeue" and step + 1 < self._config.run.steps:
            self._again += late
        return len(late)

    def _hold(self, step: int, taken: list[int]) -> None:
        self._taken = {s: numbers for s, numbers in self._taken.items() if step - NUM_HELD < s < step}
        self._taken[step] = taken
        kept = {*self._admission.ready, *(number for numbers in self._taken.values() for number in numbers)}
        self._groups = {number: group for number, group in self._groups.items() if number in kept}

    def _describe_lag(self, groups: list[Group], step: int, num_late: int) -> Metrics:
        admission, sampling = self._admission, self._sampling
        lags = [step - sample.oldest_version for group in groups for sample in group.rollouts if sample.num_actions]
        lag, updates = sum(lags) / max(1, len(lags)), self._config.algorithm.num_updates
        told = {"lag/mean": lag, "lag/max": float(max(lags, default=0))}
        told |= {"lag/updates": lag * updates} if updates > 1 else {}
        told |= {
            "stream/running": float(len(admission.running)),
            "stream/ready": float(len(admission.ready)),
            "stream/useless": float(admission.num_useless),
            "stream/surplus": float(admission.num_surplus),
            "stream/resting": float(sampling.num_resting),
            "stream/late": float(num_late),
        }
        admission.num_useless = admission.num_surplus = sampling.num_resting = 0
        return told


class SynchronousSource(EngineSource):
    """Nothing runs while the trainer trains: an evaluation ends before the training prompts are asked for."""

    def _wait_for(self, groups: Asked) -> None:
        super()._wait_for(groups)
        self._measured.forget()  # it does not belong to the step

    def _evaluate(self) -> None:
        super()._evaluate()
        with self._stopping.promptly(), self._sink.phase("evaluate"):
            self._wait_for(self._aside.evaluation)


class BatchSource(SynchronousSource):
    """All groups of a step are handed out together, so that the step can be repeated to the bit."""

    _open_journal = NoJournal

    def _keep(self, step: int, position: int) -> Sequence[int]:
        """Keep the groups requested with the weights of `step`. The stream of prompts goes on after them. Groups of
        later weights are given up."""
        running = self._admission.running
        for number in [number for number, version in running.items() if version > step]:
            self._ports.stream.cancel(number)
            del running[number]
        first = self._prompts.position
        kept = {number for number, group in self._groups.items() if number >= first and group.version == step}
        kept |= {number for number in running if number >= first}
        self._prompts.position += len(kept)
        return sorted(kept)

    def _describe_lag(self, groups: list[Group], step: int, num_late: int) -> Metrics:
        return {}


def kind_of_source(rollout: RolloutConfig) -> type[EngineSource]:
    """What a run with these settings needs."""
    return EngineSource if rollout.overlaps else SynchronousSource if rollout.one_by_one else BatchSource
