"""The interfaces, as Protocols, through which the training loop uses everything outside it.

Recipes connect the loop with implementations by Megatron, vLLM and Ray; tests connect it with small ones that run in
the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config.health import HealthRule
from megatron_rl.types import Group, GroupRequest, Mesh, Metrics, Share, Shares, Tokens


class StopRequested(BaseException):
    """Someone asked the run to stop (Ctrl-C, SIGTERM, SIGUSR1). It is no `Exception`, so that `except Exception` does
    not catch it by accident."""


class PolicyLost(RuntimeError):
    """A trainer rank has died, does not answer, or has left its peers in a collective, so the policy cannot be
    saved."""


class TooManyRestarts(RuntimeError):
    """More processes were lost than `cluster.restarts_per_hour` allows."""


class Policy(Protocol):
    """The model that is trained, with its critic if it has one. Every method raises PolicyLost when a rank is lost."""

    mesh: Mesh

    @property
    def num_changes(self) -> int:
        """The number of optimizer steps that have begun to change weights, or a loss scale, since the process began."""

    def score(self, shares: Sequence[Share]) -> Mapping[int, float]:
        """The log-prob of all actions of each sample together, in nats and at temperature 1, under the present weights,
        by the sample's index in the batch. Each data-parallel rank gets its share, which replaces its previous one.
        """
        ...

    def begin(self, shares: Shares, coefficients: Mapping[str, float]) -> Metrics:
        """Give every data-parallel rank its share of a step, and compute the objective's inputs at the step's start:
        log-probs of the policy and of the reference policy, values of a critic, and token advantages. The ranks keep
        them until the next call. Returns the mismatch between trainer and engine over the action tokens, if pi_old was
        computed, and the mean KL, if it is in the reward.

        Args:
            coefficients: see `update`.
        """

    def update(self, coefficients: Mapping[str, float]) -> tuple[list[Metrics], Metrics]:
        """One optimizer step on each mini-batch of the shares given to `begin`.

        Args:
            coefficients: the factors of the terms `kl` and `entropy`.

        Returns:
            The metrics of each update of the policy, and the critic's metrics, if there is one. The policy has no
            update in steps that train only the critic.

        Raises:
            ValueError: a number is not finite. `num_changes` tells whether an earlier update has changed weights.
        """

    def find_untrained(self) -> Sequence[int]:
        """The tokens whose embeddings no training had moved when the process began its first step."""
        ...

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Begin to write model, optimizer, learning-rate schedule, random state and `extra`. The state is copied when
        this returns; `finish_save` must be called before the next `save`.

        Args:
            extra: what the loop needs to continue, in JSON's types. The folder has it as `extra.json`.
        """

    def finish_save(self, wait: bool) -> bool:
        """Conclude the checkpoint that `save` began, and return True. Its folder appears as soon as it is complete,
        which may be before this call.

        Args:
            wait: wait until it is complete. Otherwise return False if it is still being written.

        Raises:
            ValueError: it could not be written, for example because the disk is full.
        """
        ...

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore what `save` wrote, and return its `extra`."""

    def export_hf(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder that transformers and vLLM load."""

    def mirror(self, step: int) -> None:
        """Begin to copy the state that `step` starts with into the memory of other processes, if the run keeps mirrors.
        The copy is made while the engines generate; the next call of any other method waits for it."""

    def restart(self, cause: PolicyLost) -> Collection[int]:
        """Restart all ranks, with the weights that the run began with.

        Returns:
            The steps whose state the mirrors hold.

        Raises:
            PolicyLost: a new rank was lost too.
            TooManyRestarts: the run allows no further restart.
        """

    def load_mirror(self, step: int) -> None:
        """Restore the state of a step that `restart` returned."""


class Bridge(Protocol):
    """The transfer of weights from the trainer to the engines."""

    def push(self, version: int) -> Metrics:
        """Send the policy's weights to every engine as `version`. Engines may be generating meanwhile, because each
        token records the version that sampled it."""

    def rejoin(self) -> None:
        """Connect the ranks of a restarted policy. The engines keep running.

        Raises:
            PolicyLost: a process was lost again.
        """


@dataclass(frozen=True, slots=True)
class Collected:
    """Groups whose answers are complete."""

    groups: Mapping[int, Group]
    """The groups, by the numbers of their requests. Their samples have their verdicts."""
    metrics: Metrics
    """`reward/<name>/seconds`, the time of all calls of the reward; `reward/<name>/failed`, the share of answers that
    it could not score; what its function logs; `stream/idle_s`, the idle time of all engines together since the last
    `Stream.collect`, in seconds; and `stream/span_s`, the seconds since then."""


class Stream(Protocol):
    """Engines and verifiers, which work on groups while the trainer does something else."""

    def ask(self, requests: Sequence[GroupRequest], version: int) -> None:
        """Begin to generate and to verify groups, with the weights that the engines hold. Returns at once.

        The requests of one call enter an engine together and in their order. If the engines do nothing else, and no
        push arrives meanwhile, the answers are the same to the bit whenever it is called.

        Args:
            version: the version that the engines hold now.
        """

    def cancel(self, number: int) -> None:
        """Stop generating and verifying a group. `collect` will not return it, unless it is asked for again."""

    def collect(self, version: int) -> Collected:
        """Wait for groups, and return the complete ones, each once and with its verdicts. Lost answers are generated
        again. Groups come one by one (`RolloutConfig.one_by_one`): all that are complete as soon as there is one, each
        judged and written into the journal when it was complete. Otherwise all requested groups come together, judged
        then, because a reward may need all answers of a step; the journal has none of them.

        Args:
            version: the version of the weights for a restarted engine.

        Raises:
            ValueError: a prompt does not fit the engine, or an answer cannot be scored and its reward's `on_error` is
                stop.
            RuntimeError: engines lost the answers of a group too often without dying.
            TooManyRestarts: engines died more often than the run allows.
        """

    def tokens(self, group: Group, with_routes: bool = False) -> Sequence[Tokens]:
        """Fetch the tokens of a group's samples, for the few answers that people read, and for what `rollout.dump`
        writes."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The components that the training loop calls."""

    policy: Policy
    bridge: Bridge
    stream: Stream


class Sink(Protocol):
    """The output of a run: the screen, metrics.jsonl, samples.jsonl and the experiment trackers."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure the time of a phase of the step, which is the body of the `with` statement."""

    def log(self, step: int, metrics: Metrics) -> Metrics:
        """Record the metrics of a step, together with the times of its phases and what is measured of the machines.
        Returns the whole record."""
        ...

    def recorded(self, last: int) -> list[Metrics]:
        """The records of the run's last steps, at most this number, the newest last; a resumed run has the ones from
        before. Numbers that are not finite are left out."""
        ...

    def rewind(self, step: int) -> None:
        """Forget the records of `step` and of later steps, which will be done again."""

    def warn(self, message: str, rule: HealthRule | None = None, step: int | None = None) -> None:
        """Show a warning about something that does not stop the run. A repetition of the last message is not shown.

        Args:
            rule: the health rule that is broken, if there is one.
            step: the step that it is about; None: the one that runs.

        Raises:
            ValueError: `run.stop_on` has the rule.
        """

    def samples(
        self,
        step: int,
        groups: Sequence[Group],
        fetch: Callable[[Group], Sequence[Tokens]],
        most: int,
        shares: Sequence[Share] = (),
    ) -> None:
        """Record the first answers of a step, for people to read.

        Args:
            groups: all groups of the step, in its order.
            fetch: gives the tokens of a group. It is called only for the groups that are recorded.
            most: the largest number of answers to record.
            shares: what the ranks train on, with the advantages.
        """
