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

from megatron_rl.types import Group, Mesh, Metrics, Prompt, Purpose, Share, TokenNumbers, Tokens, Verdict


class StopRequested(BaseException):
    """Someone asked the run to stop (Ctrl-C, SIGTERM, SIGUSR1). It is no `Exception`, so that `except Exception` does
    not catch it by accident."""


class PolicyLost(RuntimeError):
    """A trainer rank has died, does not answer, or has left its peers in a collective, so the policy cannot be
    saved."""


class TooManyRestarts(RuntimeError):
    """A process was lost once more than `cluster.restarts_per_hour` allows."""


class Policy(Protocol):
    """The model that is trained. Every method raises PolicyLost when a rank is lost."""

    mesh: Mesh

    def score(self, shares: Sequence[Share]) -> Mapping[int, float]:
        """The log-prob of all actions of each sample together, in nats and at temperature 1, under the present weights,
        by the sample's index in the batch. Each data-parallel rank gets its share; what it had before is forgotten.
        """
        ...

    def begin(self, shares: Sequence[Share], coefficients: Mapping[str, float]) -> Metrics:
        """Give every data-parallel rank its share of a step, and compute what the objective needs from the step's
        start: log-probs of the policy and of the reference policy, and advantages of tokens. The ranks keep them until
        the next call. Returns the mismatch between trainer and engine over the action tokens, if pi_old was computed,
        and the mean KL, if it is in the reward.

        Args:
            coefficients: see `update`.
        """

    def update(self, minibatch: int, coefficients: Mapping[str, float]) -> Metrics:
        """One optimizer step on a mini-batch of the shares given to `begin`.

        Args:
            coefficients: the factors of the terms `kl` and `entropy`.

        Raises:
            ValueError: a number is not finite. No weight has changed.
        """

    def returns(self) -> TokenNumbers:
        """What a critic has to learn from the step that `begin` was given, if the estimator needs one."""

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
        """Start all ranks anew, with the weights that the run began with.

        Returns:
            The steps whose state the mirrors hold.

        Raises:
            PolicyLost: a new rank was lost too.
            TooManyRestarts: the run allows no further restart.
        """

    def load_mirror(self, step: int) -> None:
        """Restore the state of a step that `restart` returned."""


class Critic(Protocol):
    """The model that predicts the rewards to come at each token. It is saved, loaded and started anew with the policy.
    Every method raises PolicyLost when a rank is lost."""

    mesh: Mesh

    def values(self, shares: Sequence[Share]) -> TokenNumbers:
        """Give every data-parallel rank of the critic its share of a step, and compute the values of the states in
        which the tokens were chosen."""

    def learn(self, returns: TokenNumbers) -> None:
        """Begin one optimizer step on each mini-batch of the shares. It returns at once, so that the policy is updated
        at the same time."""

    def finish(self) -> list[Metrics]:
        """Wait until the updates are done.

        Returns:
            How well the values predict the returns, and then the metrics of each update.

        Raises:
            ValueError: a number is not finite. The weights are those before that update.
        """


class Engine(Protocol):
    """The inference engines, which generate answers."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        version: int,
        seed: int,
        finished: Callable[[Group], object],
        purpose: Purpose = "training",
    ) -> list[Group]:
        """Generate `num_samples` answers to every prompt. They have no verdicts. The same seed and
        weights give the same answers.

        Args:
            finished: is called with each group as soon as all its answers are there, in any order. If an engine is
                lost, its groups are generated again, and those that it has given before are not returned.
            purpose: those for `training` get the rewards of their passages (`rollout.prefix_values`).

        Returns:
            The groups, in the order of the prompts.
        """

    def tokens(self, group: Group, with_routes: bool = False) -> Sequence[Tokens]:
        """Fetch the payload of a group, for the few answers that people read, and for what `rollout.dump` writes."""


class Bridge(Protocol):
    """The transfer of weights from the trainer to the engines."""

    def push(self, version: int) -> Metrics:
        """Bring the policy's weights into every engine as `version`. Engines may be generating meanwhile, because each
        token records the version that sampled it."""

    def rejoin(self) -> None:
        """Connect the ranks of a policy that was started anew. The engines keep running.

        Raises:
            PolicyLost: a process was lost again.
        """


class Scoring(Protocol):
    """Scores the groups of one step, while the engines still generate others."""

    def add(self, group: Group) -> None:
        """Begin to score a group, unless a reward needs all answers of the step. Returns at once."""

    def finish(self, groups: Sequence[Group]) -> tuple[list[list[Verdict]], Metrics]:
        """Wait until all is scored.

        Args:
            groups: the groups of the step, which have been added before, in any order. Others that were added do not
                count.

        Returns:
            One verdict for each sample of each group, and metrics: `reward/<name>/seconds`, the time of all calls of
            the reward, `reward/<name>/failed`, the share of answers that it could not score, and what its function
            logs. Except for times, they do not depend on the order in which groups were added.
        """


class Verifier(Protocol):
    """The rewards of the run."""

    def scoring(self) -> AbstractContextManager[Scoring]:
        """A new scoring. At the end of the context, groups whose scoring has not begun are given up."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Groups whose samples have their verdicts."""

    groups: Mapping[int, Group]
    """The groups, by the numbers with which they were asked for."""
    metrics: Metrics
    """The metrics of the scoring (see `Scoring.finish`), and `stream/idle_s`: the seconds in which engines were idle
    since the last `Stream.collect`, of all engines together, and `stream/span_s`: the seconds since then."""


class Stream(Protocol):
    """Engines and verifiers that work while the trainer does."""

    def ask(self, number: int, prompt: Prompt, num_samples: int, version: int) -> None:
        """Begin to generate and to verify a group, with whatever weights the engines hold. Returns at once.

        Args:
            number: names the group in `collect`, and seeds its answers. Only groups with numbers of 0 and above are
                written into the run's journal.
            version: the version that the engines hold now.
        """

    def cancel(self, number: int) -> None:
        """Stop generating and verifying a group. `collect` will not return it, unless it is asked for again."""

    def collect(self, version: int) -> Verified:
        """Wait until at least one group is generated and verified, and return those that are.

        Args:
            version: what an engine that is started anew gets.

        Raises:
            ValueError: a prompt does not fit the engine, or an answer cannot be scored and its reward's `on_error` is
                stop.
            RuntimeError: engines that live lost the answers of a group too often.
            TooManyRestarts: an engine died once more than the run allows.
        """


@dataclass(frozen=True, slots=True)
class Ports:
    """The parts outside the loop of reinforcement learning that it works with."""

    policy: Policy
    engine: Engine
    bridge: Bridge
    verifier: Verifier
    stream: Stream
    critic: Critic | None = None


class Sink(Protocol):
    """The output of a run: the screen, metrics.jsonl, samples.jsonl and the experiment trackers."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure the time of a phase of the step, which is the body of the `with` statement."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of a step, together with the times of its phases."""

    def rewind(self, step: int) -> None:
        """Forget the records of `step` and of later steps, which will be done again."""

    def warn(self, message: str) -> None:
        """Show a warning about something that does not stop the run. A repetition of the last message is not shown."""

    def samples(self, step: int, groups: Sequence[Group], payloads: Sequence[Sequence[Tokens]]) -> None:
        """Record a few answers as text, for people to read."""
