"""A reward model in a process of the run, which is a verifier with this reward alone: transformers' classifier scores
answers in batches.

The answers to one prompt are batches of their own, because the last bits of a score depend on the shape of its batch,
and which prompts are scored together depends on the time.

Invariants (tests/unit/cluster): a score is within 1e-5 of what `AutoModelForSequenceClassification` gives the answer
alone; its bits do not depend on the other prompts of a call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from transformers import AutoModelForSequenceClassification

from megatron_rl.config.rewards import RewardModelReward
from megatron_rl.data.forms import TEMPLATE_COLUMNS
from megatron_rl.data.scored_texts import scored_ids
from megatron_rl.data.tokenizer import open_tokenizer
from megatron_rl.types import Tokenizer, Verdict
from megatron_rl.verifiers.answer import Answer, judged_text
from megatron_rl.verifiers.reward_model import score_of
from megatron_rl.verifiers.service import without_marks

log = logging.getLogger(__name__)

BATCH_TOKENS = 16_384
"""The largest number of tokens of a batch, padding included, unless one answer has more."""


class RewardModel:
    """
    Args:
        tokenizer, delimiter: the policy's, with which answers are read.

    Raises:
        ValueError, OSError: the folder is no classifier with one class, or has no tokenizer.
    """

    def __init__(self, cfg: RewardModelReward, tokenizer: Tokenizer, delimiter: str, *, on_gpu: bool = False) -> None:
        assert cfg.path is not None, "`cluster/verifier.py` makes it for a folder"
        self._cfg, self._policy, self._delimiter = cfg, tokenizer, delimiter
        self._tokenizer = open_tokenizer(cfg.path)
        start, self._device = time.perf_counter(), "cuda" if on_gpu else "cpu"
        model = AutoModelForSequenceClassification.from_pretrained(cfg.path, dtype="auto")
        if model.num_labels != 1:
            raise ValueError(f"{cfg.label}: {cfg.path} has {model.num_labels} classes, but a reward model has one")
        self._model = model.eval().to(self._device)
        text = model.config.get_text_config()
        self._padding: int | None = text.pad_token_id
        self._longest = int(getattr(text, "max_position_embeddings", None) or 2**31)
        log.info("loaded %s on %s in %.1f s", cfg.path, self._device, time.perf_counter() - start)

    def score(self, answers: Sequence[Answer]) -> list[Verdict]:
        """One verdict for each answer, in order."""
        verdicts: dict[int, Verdict] = {}
        rows: dict[int, list[int]] = {}
        for i, answer in enumerate(answers):
            text = judged_text(answer, self._cfg.require_stop, self._delimiter, self._policy)
            if isinstance(text, Verdict):
                verdicts[i] = replace(text, score=self._cfg.unfinished_score)
                continue
            try:
                rows[i] = self._ids(answer, text)
            except ValueError as error:
                verdicts[i] = self._failed(error)
        for _, of_prompt in groupby(rows, key=lambda i: id(answers[i].prompt)):
            for batch in self._batches(sorted(of_prompt, key=lambda i: len(rows[i])), rows):
                verdicts |= self._scored({i: rows[i] for i in batch})
        return [verdicts[i] for i in range(len(answers))]

    def _ids(self, answer: Answer, text: str) -> list[int]:
        """
        Raises:
            ValueError: the chat template refuses the turns, or the model has too few positions.
        """
        columns = {name: answer.prompt.columns[name] for name in TEMPLATE_COLUMNS if name in answer.prompt.columns}
        question = answer.prompt.messages
        asked = question if isinstance(question, str) else [dict(turn) for turn in question]
        row = {**columns, "prompt": asked, "completion": without_marks(text)}
        ids = scored_ids(self._tokenizer, row, self._padding)
        if not 0 < len(ids) <= self._longest:
            raise ValueError(f"prompt and answer have {len(ids)} tokens, and the model has {self._longest} positions")
        return ids

    def _batches(self, indices: Sequence[int], rows: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
        """The rows with these indices, in the order of their lengths, in batches. Without a padding token each
        is alone."""
        batch: list[int] = []
        for i in indices:
            is_full = (len(batch) + 1) * len(rows[i]) > BATCH_TOKENS or self._padding is None
            if batch and is_full:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _scored(self, rows: dict[int, list[int]]) -> dict[int, Verdict]:
        longest = max(map(len, rows.values()))
        padded = [ids + [self._padding or 0] * (longest - len(ids)) for ids in rows.values()]
        mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in rows.values()]
        try:
            with torch.inference_mode():
                given = {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}
                output = self._model(**{name: x.to(self._device) for name, x in given.items()}, use_cache=False)
                logits: list[float] = output.logits[:, 0].float().tolist()
        except RuntimeError as error:  # such as too little memory
            return dict.fromkeys(rows, self._failed(error))
        return {i: self._verdict(logit) for i, logit in zip(rows, logits, strict=True)}

    def _verdict(self, logit: float) -> Verdict:
        try:
            return Verdict(score_of(self._cfg, logit))
        except ValueError as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> Verdict:
        return Verdict(None, f"{self._cfg.label}: {error}", failed=True)
