"""A reward model from a folder, as TRL scores with it: prompt and answer in, the only logit out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ModelReward:
    """Scores on the CPU of the verifier's process. For a large model, serve it: `rewards: [{kind: reward_model}]`."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1).eval()
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        import torch

        texts = [self._text(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]
        inputs = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            scores: list[float] = self._model(**inputs).logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, answer: Any) -> str:
        if isinstance(prompt, str):
            return f"{prompt}{answer}"
        return str(self._tokenizer.apply_chat_template([*prompt, *answer], tokenize=False))
