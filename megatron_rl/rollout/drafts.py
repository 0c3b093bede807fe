"""Speculation that changes no token: what an engine drafts (`rollout.speculative`), and when.

An answer's next tokens are drafted from what followed its last tokens the last time: in its prompt, in itself or in
another answer of its group (Saxena 2023, "Prompt lookup decoding"). Drafts decide only how many tokens a step gives,
never which (`coupling.py`).

A draft makes a step longer, whether it is accepted or not. So an answer's rate says how many of its newest tokens the
lookup would have found, drafted or not, and an answer with the rate r gets d drafts if r^d is above the share of a
step's time that one more token costs. That share is small in the tail, where a few long answers are left, and large
when many answers run.

Invariants (tests/unit/rollout): drafts are what a search of the texts finds; nothing depends on times, so a resumed run
drafts the same; drafts never go beyond the end of an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from megatron_rl.rollout.coupling import NoProposer
from megatron_rl.types import Metrics

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.outputs import DraftTokenIds

    from megatron_rl.config.speculative import Speculative

SIZE = 2
"""The number of tokens that are looked up."""
MEMORY = 8
"""The number of tokens that the rate of an answer remembers."""
STEP_COST = 14
"""What a step costs besides its tokens, in tokens: SmolLM2-135M in fp32 takes 65 ms and 4.6 ms for each token on a CPU
core."""
MOST_RUNNING = 32
"""The largest number of answers in a step that has drafts."""
SMALLEST_GAIN = 0.2
"""A step with drafts takes longer to prepare, so it is to give this share of tokens more, as expected."""


class Texts:
    """What followed each run of SIZE tokens in the texts of a group."""

    def __init__(self) -> None:
        self.newest: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}
        """The text in which a run came last, and the place behind it, which has a token."""


def copied(source: Sequence[int], start: int, text: Sequence[int], most: int) -> list[int]:
    """Up to `most` tokens of the source from a place on. If the source is the text itself, its drafts follow it.

    Example: `copied(text, 2, text, 5)` with the text [7, 8, 9, 8] is [9, 8, 9, 8, 9].
    """
    drafts = list(source[start : start + most])
    while source is text and len(drafts) < most:
        drafts.append(drafts[start + len(drafts) - len(text)])
    return drafts


def depth(rate: float, running: int, most: int) -> int:
    """How many drafts an answer gets: the largest d for which rate^d is above the share of the step that a further
    token takes.

    Args:
        running: the number of answers in the step.

    Example: half of the newest tokens were found. Alone, an answer gets 3 drafts, because 1/2^3 > 1/15 > 1/2^4.
    """
    found, share = 0, running / (STEP_COST + running)
    while found < most and rate ** (found + 1) > share:
        found += 1
    return found


class DraftedAnswer:
    """The tokens of one answer, and what would have been drafted for them."""

    def __init__(self, text: Sequence[int], num_read: int = 0) -> None:
        """
        Args:
            text: the prompt and the answer; it grows.
            num_read: how many of its tokens the group's texts have.
        """
        self.text, self.num_read, self.rate = text, num_read, 0.0
        self._next: tuple[Sequence[int], int] | None = None
        """The earlier place of its last tokens: the text, and the index behind them."""

    def read(self, texts: Texts) -> None:
        """Learn the tokens that are new, and whether they were found."""
        text, newest = self.text, texts.newest
        for end in range(self.num_read + 1, len(text) + 1):
            if self._next is not None:
                source, place = self._next
                self.rate += ((source[place] == text[end - 1]) - self.rate) / MEMORY
            if end > SIZE:
                newest[tuple(text[end - 1 - SIZE : end - 1])] = text, end - 1
            self._next = newest.get(tuple(text[end - SIZE : end])) if end >= SIZE else None
        self.num_read = len(text)

    def draft(self, most: int) -> list[int]:
        return copied(*self._next, self.text, most) if self._next and most > 0 else []


class DraftedGroup:
    """The answers of a group, as far as an engine has sampled them."""

    def __init__(self) -> None:
        self._texts = Texts()
        self._answers: dict[int, DraftedAnswer] = {}

    def begin(self, sample: int, text: Sequence[int]) -> DraftedAnswer:
        """An answer begins, or goes on with another request."""
        before = self._answers.get(sample) or next(iter(self._answers.values()), None)
        shared = min(before.num_read, len(text)) if before else 0
        known = shared if before and list(text[:shared]) == list(before.text[:shared]) else 0
        self._answers[sample] = DraftedAnswer(text, known)
        return self._answers[sample]

    def read(self) -> None:
        for answer in self._answers.values():
            if len(answer.text) > answer.num_read:
                answer.read(self._texts)


class Drafts:
    """The drafts of an engine whose workers draft with the multi-token head. Everything but `forget` happens in the
    engine's thread."""

    def __init__(self) -> None:
        self._judged: Counter[tuple[int, int, int]] = Counter()
        """How often a number of drafts, of which a number was accepted, was in a step with a number of answers."""

    def attach(self, engine: LLMEngine) -> None:
        """Count what an engine's scheduler accepts."""
        self._scheduler = engine.engine_core.engine_core.scheduler
        count = self._scheduler.make_spec_decoding_stats

        def judge(*arguments: Any, **numbers: Any) -> Any:
            size = len(self._scheduler.running)  # also those that this step ends
            self._judged[numbers["num_draft_tokens"], numbers["num_accepted_tokens"], size] += 1
            return count(*arguments, **numbers)

        self._scheduler.make_spec_decoding_stats = judge

    def begin(self, name: str, answer: tuple[int, int] | None) -> None:
        """Draft for a request from now on.

        Args:
            name: vLLM's internal name of it.
            answer: see `Request.answer`.
        """

    def forget(self, ticket: int) -> None:
        """The answers of a group are complete."""

    def take_counts(self) -> Metrics:
        """How many tokens were drafted, and how many of these accepted, since the last call: in all, by depth, and by
        the number of answers in the step, which is rounded up to a power of 2."""
        counts: Counter[str] = Counter()
        for (num_drafts, num_accepted, num_running), times in self._judged.items():
            size = 1 << (num_running - 1).bit_length()
            for kind, number in (("drafted", num_drafts), ("accepted", num_accepted)):
                counts[kind] += times * number
                counts[f"{kind}/running_{size}"] += times * number
                for depth in range(number):
                    counts[f"{kind}/depth_{depth + 1}"] += times
        self._judged.clear()
        return {name: float(number) for name, number in counts.items()}


class LookedUpDrafts(Drafts):
    """The drafts that are looked up, in the engine's process."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: the largest number of drafts of an answer in a step.
        """
        super().__init__()
        self._most = most
        self._groups: dict[int, DraftedGroup] = {}
        self._answers: dict[str, tuple[DraftedGroup, DraftedAnswer]] = {}
        """The groups and the answers by vLLM's names of the requests."""

    def attach(self, engine: LLMEngine) -> None:
        """Give the drafts to an engine's scheduler, too. vLLM would ask its workers for them."""
        super().attach(engine)
        # With it vLLM pads a request that begins with one token by drafts of -1, which a CPU looks up.
        self._scheduler.num_spec_tokens = 0
        engine.engine_core.engine_core.model_executor.take_draft_token_ids = self._of_step

    def begin(self, name: str, answer: tuple[int, int] | None) -> None:
        text = self._scheduler.requests[name]._all_token_ids
        group = self._groups.setdefault(answer[0], DraftedGroup()) if answer else DraftedGroup()
        self._answers[name] = group, group.begin(answer[1] if answer else 0, text)

    def forget(self, ticket: int) -> None:
        self._groups.pop(ticket, None)

    def _of_step(self) -> DraftTokenIds | None:
        """The drafts of the next step."""
        from vllm.v1.outputs import DraftTokenIds

        running = self._scheduler.running
        self._answers = {name: one for name, one in self._answers.items() if name in self._scheduler.requests}
        if len(running) > MOST_RUNNING:
            return None
        drafts: dict[str, list[int]] = {}
        expected = 0.0
        for request in running:
            if request.request_id not in self._answers or request.is_prefill_chunk:
                continue
            group, answer = self._answers[request.request_id]
            group.read()
            room = request.max_tokens - request.num_output_tokens - 1
            stops = request.sampling_params.stop_token_ids
            drafted = answer.draft(min(room, depth(answer.rate, len(running), self._most)))
            found = [*takewhile(lambda token: token not in stops, drafted)]  # nothing follows one
            drafts[request.request_id] = found
            expected += sum(answer.rate ** (i + 1) for i in range(len(found)))
        if expected < SMALLEST_GAIN * len(running):
            return None
        return DraftTokenIds(list(drafts), list(drafts.values()))


def drafts_of(speculative: Speculative) -> Drafts:
    return LookedUpDrafts(speculative.tokens) if speculative.kind == "ngram" else Drafts()


def speculative_config(speculative: Speculative) -> dict[str, Any]:
    """vLLM's argument of this name. vLLM's class for the multi-token head drafts greedily, and reads the tokens of a
    step without drafts, too, so that it knows them later."""
    if speculative.kind == "multi_token":
        sizes = [(1, MOST_RUNNING, speculative.tokens), (MOST_RUNNING + 1, MOST_RUNNING + 1, 0)]
        kind = {"method": "mtp", "num_speculative_tokens_per_batch_size": sizes}  # the last entry is for more, too
    else:
        kind = {"method": "custom_class", "model": f"{NoProposer.__module__}.{NoProposer.__qualname__}"}
    return kind | {"num_speculative_tokens": speculative.tokens}


def draft_metrics(engines: Iterable[Metrics]) -> Metrics:
    """The metrics of a step, of all engines together; empty if none drafts.

    Args:
        engines: what each engine counted (`take_counts`), and `sampled`, its tokens of finished requests.
    """
    total: Counter[str] = Counter()
    for engine in engines:
        total.update(
            {name: int(n) for name, n in engine.items() if name.startswith(("drafted", "accepted", "sampled"))}
        )
    if "sampled" not in total:
        return {}
    parts = [name.removeprefix("drafted/") for name in total if name.startswith("drafted/")]
    return {
        "rollout/drafted": float(total["drafted"]),
        "rollout/accepted": float(total["accepted"]),
        "rollout/accepted/share": total["accepted"] / max(total["sampled"], 1),
        **{f"rollout/accepted/{part}": total[f"accepted/{part}"] / total[f"drafted/{part}"] for part in parts},
    }
