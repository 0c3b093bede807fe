"""An engine without vLLM: transformers on the CPU, one answer after the other. It is slow, and shows what
`rollout.backend` needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_rl.rollout.answer import request_seed
from megatron_rl.rollout.backend import EngineSpec
from megatron_rl.rollout.program import Completion, Samples, Transcript, as_rollout
from megatron_rl.rollout.vocabulary import stop_ids
from megatron_rl.types import GroupRequest, Phase


class TransformersEngine:
    """It loads the weights of the model's folder, so its `weights` are itself and take no push."""

    def __init__(self, spec: EngineSpec) -> None:
        if not spec.loads_weights:
            raise ValueError("transformers_engine answers with the weights of a folder alone")
        self.spec, self.weights, self.alive = spec, self, True
        self._stop_ids = stop_ids(spec.model.path)

    async def start(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(self.spec.model.path, dtype=torch.float32).eval()

    async def enter(self, phase: Phase) -> None:
        pass

    async def answer(
        self,
        ticket: int,
        asked: GroupRequest,
        samples: range,
        version: int | None = None,
        batch: tuple[int, int] | None = None,
        earlier: Sequence[Path] = (),
    ) -> tuple[Samples, Samples]:
        first = request_seed(self.spec.seed, *asked.seed)
        return [self._sampled(asked.prompt.token_ids, first + i) for i in samples], []

    @torch.no_grad()
    def _sampled(self, prompt: Sequence[int], seed: int):
        noise, ids, logps = torch.Generator().manual_seed(seed), list(prompt), []
        while len(logps) < self.spec.rollout.max_response_tokens and (not logps or ids[-1] not in self._stop_ids):
            logits = self._model(torch.tensor([ids])).logits[0, -1] / self.spec.rollout.sampling.temperature
            logp = logits.log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=noise))
            ids.append(token)
            logps.append(float(logp[token]))
        transcript, new = Transcript(), ids[len(prompt) :]
        transcript.sampled(Completion(new, logps, [0] * len(new), stopped=new[-1] in self._stop_ids))
        return as_rollout(prompt, transcript, None)

    async def cancel(self, ticket: int) -> None:
        pass

    def close(self) -> None:
        self.alive = False
