"""What the loop needs from the world, as Protocols: the loop (L2) is written against these alone.

Recipes join the loop to the real rooms (Megatron, vLLM, Ray); tests join it to small in-process ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.types import Batch, Group, Mesh, Metrics, MicrobatchPlan, Prompt, Tokens, Verdict


class StopRequested(BaseException):
    """Someone asked the run to stop (Ctrl-C, SIGTERM, SIGUSR1). Not an `Exception`: nothing handles it by accident."""


class PolicyLost(RuntimeError):
    """A trainer rank has died, does not answer, or left its peers in a collective: the policy cannot be saved."""


class Policy(Protocol):
    """The model that learns. Every method raises PolicyLost when a rank is lost."""

    mesh: Mesh

    def begin(self, batch: Batch, plan: MicrobatchPlan) -> Metrics:
        """Hand every rank its own samples and compute what the objective needs of the policy and its reference at
        the step's start; the ranks keep it until the next call. Returns the mismatch between trainer and engine
        over action tokens, where pi_old was computed."""

    def update(self, minibatch: int, coefficients: Mapping[str, float]) -> Metrics:
        """One optimizer step on a mini-batch of the plan given to `begin`.

        Args:
            coefficients: what the terms of the loss are multiplied by: `kl`, `entropy`.

        Raises:
            ValueError: a number is not finite; no weight has changed.
        """

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write model, optimizer, schedule, RNG and `extra` so that the folder exists whole or not at all.

        Args:
            extra: what the loop needs to go on, in JSON's types; it lies in the folder as `extra.json`.
        """

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore what `save` wrote; returns its `extra`."""

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder that transformers and vLLM load."""


class Engine(Protocol):
    """The model that answers."""

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, version: int, seed: int, greedy: bool = False
    ) -> list[Group]:
        """Answer every prompt `num_samples` times, unverified (`reward` None). The same seed and weights
        give the same answers. `greedy`: with the most probable tokens, in place of the run's sampling."""

    def tokens(self, group: Group) -> Sequence[Tokens]:
        """A group's payload, fetched: for the few answers that people read."""


class Bridge(Protocol):
    def push(self, version: int) -> Metrics:
        """Bring the policy's weights into every engine as `version`. Engines may be generating: each token carries the
        version that sampled it."""


class Verifier(Protocol):
    def score(self, groups: Sequence[Group]) -> tuple[list[list[Verdict]], Metrics]:
        """One verdict a sample, and what is to be logged of the scoring: `reward/<name>/seconds`, and
        `reward/<name>/failed`, the share of answers that the reward could not score."""


class Sink(Protocol):
    """Where numbers go: the screen, metrics.jsonl, samples.jsonl, the trackers."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times what runs inside; the step's time split is made of these."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def warn(self, message: str) -> None:
        """Tell people of something that does not stop the run; the same message is told once in a row."""

    def samples(self, step: int, groups: Sequence[Group], payloads: Sequence[Sequence[Tokens]]) -> None:
        """Keep a few answers for people, as text."""
