"""The rollouts that engines generate: in turns with the trainer, or while it trains.

`admission.py` decides which groups run and which ones a step takes. This module asks for the prompts,
holds the groups, and gives their state to a checkpoint. In turns (`rollout.max_lag: 0`) nothing runs between two steps,
so that a step can be repeated to the bit.

Invariants (tests/unit/loop, tests/e2e): a resumed run requests the unfinished groups again, with their own prompts, and
takes groups that were ready, or that were trained on after the checkpoint, from the journal, which a run in turns does
not need; the groups of a step that the trainer interrupted are trained on again and not generated again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from megatron_rl.algorithms.equality import all_equal
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream, prune_journal, read_journal
from megatron_rl.loop.admission import Admission
from megatron_rl.loop.budgets import ThoughtBudgets
from megatron_rl.loop.checkpoints import due, find_checkpoints
from megatron_rl.loop.evaluation import describe_heldout, right_answers
from megatron_rl.loop.generation_metrics import NUM_HELD, GenerationMetrics
from megatron_rl.loop.health.answers import StepWarnings, describe_unscored
from megatron_rl.loop.pass_rates import PassRates
from megatron_rl.loop.rollouts import describe_verified, rewards_of, verdicts_of
from megatron_rl.loop.stopping import Stopping
from megatron_rl.loop.untrained_groups import AsideGroups, Asked
from megatron_rl.ports import Ports, Sink
from megatron_rl.types import Group, GroupRequest, Metrics, Prompt, Rollouts

NUM_TRIES = 64
"""A run with active sampling ends after this number of batches of groups without any signal."""
STEPS = 2**20
"""The seeds of the steps of one `run.seed`. The last one is for all evaluations, so that their accuracies can be
compared."""


class EngineSource:
    def __init__(
        self,
        config: GrpoRunConfig,
        ports: Ports,
        prompts: ShuffledStream[Prompt],
        heldout: Sequence[Prompt],
        sink: Sink,
        stopping: Stopping,
    ) -> None:
        """
        Args:
            heldout: the prompts of evaluations; if it is empty, nothing is evaluated.
        """
        self._config, self._ports, self._sink, self._stopping = config, ports, sink, stopping
        self._prompts, self._heldout = prompts, heldout
        rollout = config.rollout
        self._max_lag = rollout.max_lag
        self._checkpoints = config.run_folder / "checkpoints"
        self._admission = Admission(rollout.prompts_per_step, rollout.max_lag, rollout.late == "wait")
        self._warnings = StepWarnings(config.rewards)
        self._budgets = ThoughtBudgets(config)
        self._given: dict[int, tuple[int, ...]] = {}
        """The thinking budgets of the requested groups that are not complete, by their numbers: a repeated request has
        the same budgets."""
        self._pass_rates = PassRates()
        self._num_resting = 0
        """The number of prompts that rested when their turn came, since the last step."""
        self._groups: dict[int, Group] = {}
        """The ready groups, and the groups that the last NUM_HELD steps have taken."""
        self._taken: dict[int, list[int]] = {}
        """The numbers of the groups that a step has taken."""
        self._again: list[int] = []
        """The groups that are requested again at the next push: groups of a checkpoint, and late ones."""
        self._journal = config.run_folder / "journal"
        self._written: dict[int, Group] | None = None
        """The groups of the journal that are not in use yet; None before the first push or the first checkpoint."""
        self._aside, self._measured = AsideGroups(ports.stream), GenerationMetrics(rollout.num_engines)
        self._evaluating: Asked = {}
        self._useless: Counter[str] = Counter()
        """The rewards of the groups without a signal, since the last group with one."""
        self._version = self._step = self._resumed_at = 0

    def pushed(self, version: int) -> None:
        """See `RolloutSource`. In an asynchronous run the held-out prompts are answered together with the training
        prompts, while the step is updated."""
        self._version, num_steps = version, self._config.run.steps
        if self._heldout and (version in (0, num_steps) or due(version, self._config.eval.every)):
            self._evaluate()
        if version == num_steps:
            return
        if self._config.rollout.one_by_one:
            if self._written is None:  # the run begins, so a journal belongs to an earlier start
                prune_journal(self._journal, version=2**62)
            prune_journal(self._journal, max(find_checkpoints(self._checkpoints), default=0) - self._max_lag)
        self._written = self._written or {}
        known = {*self._admission.running, *self._admission.ready, *self._again}
        self._given = {number: budgets for number, budgets in self._given.items() if number in known}
        again, self._again = self._again, []
        self._refill([(number, self._prompts.item(number)) for number in again])

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
            metrics = self._describe(groups, step, num_late)
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
        """Wait until all groups are there. In a run in turns, measurements of this wait do not belong to the step."""
        while None in groups.values():
            self._collect()
        if not self._config.rollout.overlaps:
            self._measured.forget()

    def _evaluate(self) -> None:
        num_samples = self._config.eval.samples_per_prompt
        self._evaluating = self._aside.ask(self._heldout, num_samples, self._version, STEPS - 1, is_greedy=False)
        if not self._config.rollout.overlaps:
            with self._stopping.promptly(), self._sink.phase("evaluate"):
                self._wait_for(self._evaluating)

    def evaluated(self) -> Metrics:
        """See `RolloutSource`. If the run is asked to stop, the evaluation is given up, with a warning."""
        with self._sink.phase("evaluate"):
            while None in self._evaluating.values() and not self._stopping():
                self._collect()
        groups, self._evaluating = self._evaluating, {}
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
            "pass_rates": self._pass_rates.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: the state belongs to other data.
        """
        position = self._prompts.position
        self._prompts.restore(state)
        waiting = state.get("waiting", [])
        if self._config.rollout.one_by_one:
            # In a run that goes on after its policy was lost, the engines still work on groups that are younger than
            # the state. They are kept, so the stream does not go back behind them.
            self._prompts.position = max(position, self._prompts.position)
        else:
            waiting = [*waiting, *self._keep(state["step"])]
        if self._written is None:
            self._written = read_journal(self._journal) if self._config.rollout.one_by_one else {}
            self._resumed_at = state["step"]
        self._step = state["step"]
        self._aside.cancel(self._evaluating)
        self._evaluating = {}
        self._pass_rates.restore(state.get("pass_rates", {}))
        self._budgets.restore(state.get("thoughts", []))
        self._given |= {number: tuple(budgets) for number, budgets in state.get("thought_budgets", [])}
        for number in waiting:
            admission = self._admission
            if any(number in known for known in (admission.running, admission.ready, self._again)):
                continue
            if number in self._groups:
                self._admission.put_back(number, self._groups[number].version)
            else:
                self._again.append(number)

    def _keep(self, step: int) -> list[int]:
        """The numbers of the groups that a run in turns keeps after its policy was lost: the groups requested with the
        weights of `step`. The stream of prompts goes on after them. Groups of later weights are given up."""
        running = self._admission.running
        for number in [number for number, version in running.items() if version > step]:
            self._ports.stream.cancel(number)
            del running[number]
        first = self._prompts.position
        kept = {number for number, group in self._groups.items() if number >= first and group.version == step}
        kept |= {number for number in running if number >= first}
        self._prompts.position += len(kept)
        return sorted(kept)

    def _refill(self, again: Sequence[tuple[int, Prompt]] = ()) -> bool:
        """Request as many groups as there is room for, the groups of `again` first. Returns whether there was any;
        groups of the journal are ready at once."""
        requests = [self._admit(number, prompt) for number, prompt in again]
        asked = self._draw(self._admission.room(self._config.run.steps - self._version))
        requests += [self._admit(number, prompt) for number, prompt in asked]
        if requests := [request for request in requests if request is not None]:
            self._ports.stream.ask(requests, self._version)
        return bool(asked)

    def _draw(self, count: int) -> list[tuple[int, Prompt]]:
        """The next prompts that do not rest, with their numbers. If all prompts of an epoch rest, they are drawn
        nevertheless."""
        drawn: list[tuple[int, Prompt]] = []
        num_passed = 0
        while len(drawn) < count:
            [(number, prompt)] = self._prompts.take(1)
            rests = self._pass_rates.rests(prompt.uid, self._prompts.epoch(number))
            if rests and number not in (self._written or {}) and num_passed < len(self._prompts):
                num_passed += 1
            else:
                drawn.append((number, prompt))
        self._num_resting += num_passed
        return drawn

    def _admit(self, number: int, prompt: Prompt) -> GroupRequest | None:
        """What is asked for a group; None if it is in the journal, and so ready."""
        assert self._written is not None
        kept = self._written.pop(number, None)
        # An older one is a late group that was requested again and had not finished by then.
        if kept is not None and kept.prompt.uid == prompt.uid and kept.version >= self._version - self._max_lag:
            group = _from_journal(kept, prompt, self._version, self._resumed_at)
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
        self._require_a_signal()

    def _finish(self, number: int, group: Group) -> None:
        tries, useful, fills = self._config.rollout.active_sampling, True, False
        if tries:
            verdicts = verdicts_of([group])
            rewards = [verdict.reward for verdict in verdicts]
            useful = not all_equal(r for r in rewards if r is not None)
            if right := right_answers(self._config, verdicts):
                self._pass_rates.record(group.prompt.uid, fmean(right), self._prompts.epoch(number))
            fills = tries is not True and self._admission.useless_batches >= tries - 1
            self._useless[", ".join(sorted({"none" if r is None else f"{r:g}" for r in rewards}))] += 1
        if useful:
            self._useless.clear()
        if self._admission.finish(number, useful or fills):
            self._groups[number] = group

    def _require_a_signal(self) -> None:
        total = self._useless.total()
        if total >= NUM_TRIES * self._config.rollout.prompts_per_step:
            seen = "; ".join(f"{rewards}: {count} groups" for rewards, count in self._useless.most_common(5))
            raise ValueError(
                f"active sampling found no group with a signal among the last {total}: all answers to a prompt had the "
                f"same reward ({seen}). Check the reward on a few answers (samples.jsonl), choose prompts of another "
                "difficulty, or raise rollout.samples_per_prompt"
            )

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

    def _describe(self, groups: list[Group], step: int, num_late: int) -> Metrics:
        metrics = describe_verified(self._config, groups) | self._measured.of_step(step)
        if not self._config.rollout.one_by_one:
            return metrics
        resting, self._num_resting = self._num_resting, 0
        admission = self._admission
        useless, surplus = admission.num_useless, admission.num_surplus
        admission.num_useless = admission.num_surplus = 0
        lags = [step - sample.oldest_version for group in groups for sample in group.rollouts if sample.num_actions]
        lag, updates = sum(lags) / max(1, len(lags)), self._config.algorithm.num_updates
        if updates > 1:
            metrics["lag/updates"] = lag * updates
        return metrics | {
            "lag/mean": lag,
            "lag/max": float(max(lags, default=0)),
            "stream/running": float(len(self._admission.running)),
            "stream/ready": float(len(self._admission.ready)),
            "stream/useless": float(useless),
            "stream/surplus": float(surplus),
            "stream/resting": float(resting),
            "stream/late": float(num_late),
        }


def _from_journal(kept: Group, prompt: Prompt, version: int, resumed_at: int) -> Group:
    """A group of the journal, with its prompt.

    The weights of the versions after the checkpoint are lost: the run trains them again, with other answers. A group of
    these versions counts as one of `version`. Its tokens get the version before the checkpoint, so that nobody expects
    the trainer to give them the same log-probs. The checkpoint's own version is there again.
    """
    tokens = [
        replace(t, version=np.where(t.version > resumed_at, resumed_at - 1, t.version).astype(np.int32))
        for t in kept.payload
    ]
    samples = [
        replace(sample, oldest_version=sample.oldest_version if sample.oldest_version <= resumed_at else resumed_at - 1)
        for sample in kept.rollouts
    ]
    began = min(kept.version, version)
    return replace(kept, prompt=prompt, rollouts=samples, payload=tokens, version=began)
