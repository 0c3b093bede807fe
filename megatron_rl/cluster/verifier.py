"""The rewards, which separate processes compute. `stream.py` asks them.

Invariants (tests/e2e): if a reward function hangs or kills its process, only its own scores of that call are lost, and
the process is replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

import ray

from megatron_rl import spans
from megatron_rl.algorithms.shaping import repeated_share, repetition_sizes, shape_verdicts
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.payloads import StoredTokens, fetch
from megatron_rl.cluster.process import Location, Process, begin_process, locate
from megatron_rl.cluster.process_trace import TracedProcess
from megatron_rl.cluster.restarts import Restarts
from megatron_rl.cluster.scoring import Piece, added_up, in_order, results
from megatron_rl.cluster.waiting import ProcessLost, gather, in_thread, locate_all
from megatron_rl.config.rewards import RewardModelReward, ServiceReward
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.journal import JournalWriter
from megatron_rl.data.tokenizer import open_tokenizer
from megatron_rl.types import Group, Metrics, Prompt, Rollout, Tokenizer, Tokens, Verdict
from megatron_rl.verifiers import RewardSet, Scored, TrainerState, answers_of
from megatron_rl.verifiers.answer import Answer
from megatron_rl.verifiers.failures import FailureLog

log = logging.getLogger(__name__)

WRITING = "to write the journal"
"""What a verifier is asked to do, as messages name it."""
CANCEL_S = 10.0
"""The seconds that asynchronous rewards of one call, or one that asks a server, have to end after their time limits,
before the process is lost with the scores of all of them."""


class VerifierRank(TracedProcess):
    """The process of the reward functions. A slow or crashing function does not stop the driver."""

    def __init__(self, config: GrpoRunConfig, own: Sequence[int], path: str, name: str) -> None:
        begin_process(Path(path), name)
        self.config, self.own = config, own
        self._judged: tuple[list[Any], list[Answer], list[dict[int, float]]] = [], [], []
        """The payloads of the last call, their answers, and the answers' repeated shares. The next call often has the
        same payloads, because each kind of reward has a call of its own."""

    def locate(self) -> Location:
        return locate()

    def load(self) -> list[list[int]]:
        """
        Returns:
            The indices of the rewards of each call of `score`.

        Raises:
            ValueError: a reward function cannot be imported.
        """
        config, delimiter = self.config, self.config.rollout.delimiter
        log.info("loading the tokenizer and the rewards: %s", ", ".join(config.rewards[i].label for i in self.own))
        tokenizer = open_tokenizer(config.model.path)
        decoder = cast(Tokenizer, tokenizer)  # it gives one text for one list of tokens
        made = {}
        for i in set(self.own) & set(config.scored_by_model):
            from megatron_rl.cluster.reward_model import RewardModel  # it imports transformers' models

            reward = cast(RewardModelReward, config.rewards[i])
            made[i] = RewardModel(reward, decoder, delimiter, on_gpu=config.cluster.reward_model_gpus > 0)
        self.rewards = RewardSet(config.rewards, decoder, delimiter, config.cluster.verifier_workers, self.own, made)
        self.journal = JournalWriter(config.run_folder / "journal")
        return self.rewards.calls

    def score(
        self, indices: list[int], step: int, prompts: list[Prompt], payloads: list[Any], rollouts: list[list[Rollout]]
    ) -> list[Scored]:
        """What the rewards with these indices give for all answers (see `RewardSet.score`), and in each verdict the
        share of repeated n-grams that shaping needs."""
        are_stored = all(isinstance(one, StoredTokens) for payload in payloads for one in payload)
        if not are_stored or payloads != self._judged[0]:
            answers = answers_of(prompts, _of_groups(payloads), rollouts)
            sizes = repetition_sizes(self.config.algorithm.shaping)
            shares = [{size: repeated_share(answer.response_ids, size) for size in sizes} for answer in answers]
            self._judged = payloads, answers, shares
        _, answers, shares = self._judged
        with spans.span("score", ", ".join(self.config.rewards[index].label for index in indices)):
            given = self.rewards.score(indices, answers, TrainerState(step, self.config.run.steps))
        for index, scored in zip(indices, given, strict=True):
            num_scored = sum(verdict.score is not None for verdict in scored.verdicts)
            label = self.config.rewards[index].label
            log.info("%s scored %d of %d answers in %.3f s", label, num_scored, len(answers), scored.seconds)
        if not any(shares):
            return given
        return [
            replace(scored, verdicts=[replace(v, repeated=own) for v, own in zip(scored.verdicts, shares, strict=True)])
            for scored in given
        ]

    def write(self, groups: dict[int, Group]) -> None:
        """Write groups into the run's journal, by their numbers."""
        kept = _of_groups([group.payload for group in groups.values()], with_routes=True)
        given = zip(groups.items(), kept, strict=True)
        self.journal.write({number: replace(group, payload=tokens) for (number, group), tokens in given})


def _of_groups(payloads: Sequence[Sequence[Any]], with_routes: bool = False) -> list[list[Tokens]]:
    """The tokens of each group's payload."""
    fetched = iter(fetch((one for payload in payloads for one in payload), with_routes=with_routes))
    return [[next(fetched) for _ in payload] for payload in payloads]


class VerifierGroup:
    """All verifiers."""

    role = "verifier"

    def __init__(self, config: GrpoRunConfig, logs: Path, placement: RayPlacement, restarts: Restarts) -> None:
        self._rewards, self._shaping = config.rewards, config.algorithm.shaping
        self._failures = FailureLog(logs / "rewards.log")
        more, num = (placement, restarts, self._failures), config.cluster.verifiers
        indices = config.scored_by_model
        models = {i: RayVerifier(config, logs, *more, Duty("reward_model", n, [i])) for n, i in enumerate(indices)}
        others = [i for i in range(len(config.rewards)) if i not in models]
        self.verifiers = [RayVerifier(config, logs, *more, Duty("verifier", n, others), models) for n in range(num)]
        self._all = [*self.verifiers, *models.values()]

    @property
    def processes(self) -> list[Process]:
        return [verifier.process for verifier in self._all]

    @property
    def num_restarts(self) -> int:
        """The number of processes that were replaced since the run began."""
        return sum(verifier.num_restarts for verifier in self._all)

    def wait(self) -> None:
        """Wait until all rewards are loaded. They load while engines and policy start.

        Raises:
            ValueError: a reward function cannot be imported.
        """
        for verifier in self._all:
            verifier.wait()

    def decide(self, groups: Sequence[Group], pieces: Sequence[Piece]) -> tuple[list[list[Verdict]], Metrics]:
        """The verdicts on all answers of a step, in one piece.

        Args:
            pieces: what the rewards have given that do not need all answers of a step. They are called again for the
                groups that are in none. The others are called now: each verifier gets a part of the groups, at the same
                time as the others.

        Returns:
            See `RayVerifier.score`. Except for times, it does not depend on the pieces.

        Raises:
            ValueError: an answer cannot be scored, and the reward's `on_error` is stop.
        """
        num = len(self.verifiers)
        bounds = [len(groups) * i // num for i in range(num + 1)]
        parts = [(v, slice(a, b)) for v, a, b in zip(self.verifiers, bounds, bounds[1:], strict=False) if b > a]
        late = [i for i, reward in enumerate(self._rewards) if reward.needs_all_answers]
        early = [i for i in range(len(self._rewards)) if i not in late]
        known = {id(group) for own, _ in pieces for group in own}
        missing = [group for group in groups if id(group) not in known]
        if missing and early:
            pieces = [*pieces, (missing, self.verifiers[0].scored(missing, early))]
        given = {i: in_order(groups, pieces, i) for i in early}
        if late:
            calls = [in_thread(partial(v.scored, groups[part], late), "score") for v, part in parts]
            others = [(groups[part], one) for (_, part), one in zip(parts, results(calls), strict=True)]
            given |= {i: in_order(groups, others, i) for i in late}
        verdicts, metrics = added_up(self._rewards, groups, given, self._failures)
        return shape_verdicts(verdicts, [group.rollouts for group in groups], self._shaping), metrics


class Duty(NamedTuple):
    """What a process of rewards is for."""

    role: str
    """`verifier` or `reward_model`."""
    number: int
    """Its number among the processes of this role."""
    rewards: Sequence[int]
    """The indices of its rewards."""


class RayVerifier:
    """One verifier, or the process of a reward model, which is one with this reward alone.

    Args:
        models: the processes of reward models, by the indices of their rewards.
    """

    def __init__(
        self,
        config: GrpoRunConfig,
        logs: Path,
        placement: RayPlacement,
        restarts: Restarts,
        failures: FailureLog,
        duty: Duty,
        models: Mapping[int, RayVerifier] = {},
    ) -> None:
        self._config, self._placement, self._restarts = config, placement, restarts
        self._failures, self._duty, self._models = failures, duty, models
        self.num_restarts = 0
        self._lock = Lock()
        """Held while the process works: a time limit applies to one call, and the process is replaced once."""
        role, number, _ = duty
        num = config.cluster.verifiers if role == "verifier" else len(config.scored_by_model)
        name = role.replace("_", " ") + (f" {number}" if num > 1 else "")
        log_path = logs / f"{name.replace(' ', '_')}.log"
        self.process = Process(name, log_path, None)
        self.process.actor = self._new(number)
        self._loading = self.process.actor.load.remote()

    def _new(self, index: int) -> Any:
        options = self._placement.rank_options(self._duty.role, index, 0)
        path, name = str(self.process.log), self.process.name
        return ray.remote(VerifierRank).options(**options).remote(self._config, self._duty.rewards, path, name)

    def wait(self) -> None:
        """Wait until the rewards are loaded. They load while engines and policy start.

        Raises:
            ValueError: a reward function cannot be imported.
        """
        timeout_s = self._config.cluster.start_timeout_s
        gpus = self._config.cluster.reward_model_gpus if self._duty.role == "reward_model" else 0
        locate_all([self.process], timeout_s, f"{gpus:g} GPU" if gpus else "no resources")
        self._calls = gather([self._loading], [self.process], "to load the rewards", timeout_s)[0]

    def score(self, groups: Sequence[Group]) -> tuple[list[list[Verdict]], Metrics]:
        """Score groups with all rewards.

        Returns:
            One verdict for each rollout of each group, and the metrics of `added_up`.

        Raises:
            ValueError: an answer cannot be scored, and the reward's `on_error` is stop.
        """
        rewards = self._config.rewards
        given = self.scored(groups, range(len(rewards)))
        verdicts, metrics = added_up(rewards, groups, given, self._failures)
        return shape_verdicts(verdicts, [group.rollouts for group in groups], self._config.algorithm.shaping), metrics

    def scored(self, groups: Sequence[Group], indices: Collection[int]) -> dict[int, Scored]:
        """What the rewards with these indices give for the answers, by index.

        Raises:
            ValueError: an answer cannot be scored, and the reward's `on_error` is stop.
        """
        given: dict[int, Scored] = {}
        asked = [model for index, model in self._models.items() if index in indices]
        calls = [in_thread(partial(model.scored, groups, indices), "score") for model in asked]
        for call in self._calls:
            if own := [index for index in call if index in indices]:
                given.update(zip(own, self._score_with(own, groups), strict=True))
        for of_model in results(calls):
            given |= of_model
        return given

    def write(self, groups: Mapping[int, Group]) -> None:
        """Write verified groups, by their numbers, into the run's journal.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        deadlines = self._placement.deadlines
        deadlines.begin(WRITING)
        self._ask("write", WRITING, deadlines.limit_s(WRITING), dict(groups))
        deadlines.end(WRITING)

    def _score_with(self, indices: list[int], groups: Sequence[Group]) -> list[Scored]:
        """What the rewards of one call gave. If the call is lost, all of them have failed."""
        rewards = [self._config.rewards[index] for index in indices]
        timeout_s = max(reward.timeout_s for reward in rewards)
        if len(rewards) > 1 or isinstance(rewards[0], ServiceReward):
            timeout_s += CANCEL_S
        rollouts = [group.rollouts for group in groups]
        prompts, payloads = [group.prompt for group in groups], [group.payload for group in groups]
        start = time.perf_counter()
        try:
            doing = f"to score with {', '.join(reward.label for reward in rewards)}"
            version = groups[0].version
            scored: list[Scored] = self._ask("score", doing, timeout_s, indices, version, prompts, payloads, rollouts)
            return scored
        except ProcessLost as error:
            if any(reward.on_error == "stop" for reward in rewards):
                raise
            failed = [Verdict(None, str(error), failed=True) for group in groups for _ in group.rollouts]
            return [Scored(failed, time.perf_counter() - start, {}) for _ in rewards]

    def _ask(self, method: str, doing: str, timeout_s: float, *arguments: Any) -> Any:
        """The answer of the process. If the process dies, it is asked for again, because the call may not be the
        cause. The same holds if something outside has stopped it. Otherwise a call that is not answered in time is not
        repeated.

        If a process that scores answers dies in the same call again, a reward has ended it. Then only these answers are
        lost, and the run's restarts are not used.

        Raises:
            ProcessLost: there is no answer. The process has been replaced.
        """
        with self._lock:
            try:
                return self._ask_once(method, doing, timeout_s, *arguments)
            except ProcessLost as error:
                if error.silent and not error.stopped:
                    raise
                first = error
            try:
                return self._ask_once(method, doing, timeout_s, *arguments)
            except ProcessLost as error:
                if method != "score" or any(lost.silent or lost.stopped for lost in (first, error)):
                    raise
                for lost in (first, error):
                    self._restarts.take_back(str(lost))
                name = doing.removeprefix("to score with ")
                raise ProcessLost(
                    f"{name}: the verifier's process died twice while it scored these answers, so that a reward has "
                    f"ended it: by os._exit, a signal, an error in a library, or too much memory. {error}",
                    silent=False,
                ) from None

    def _ask_once(self, method: str, doing: str, timeout_s: float, *arguments: Any) -> Any:
        call = getattr(self.process.actor, method).remote(*arguments)
        try:
            return gather([call], [self.process], doing, timeout_s)[0]
        except ProcessLost as error:
            log.warning("%s", error)
            if (
                not error.silent or error.stopped
            ):  # a reward that hangs in every step has a time limit of its own, but no budget
                self._restarts.spend(str(error))
            self._restart()
            raise

    def _restart(self) -> None:
        ray.kill(self.process.actor)
        self.num_restarts += 1
        timeout_s = self._config.cluster.start_timeout_s
        role, number, _ = self._duty
        self._placement.start_again(role, {number: self.process}, self._new, timeout_s)
        self._loading = self.process.actor.load.remote()
        self.wait()
