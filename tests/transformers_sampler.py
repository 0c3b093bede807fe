"""A sampler without vLLM: transformers on the CPU, one completion after the other. It is slow, and shows what
`rollout.backend` needs."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM

from megatron_rl.rollout.backend import EngineSpec, Sampler
from megatron_rl.rollout.program import Completion, Request


class TransformersSampler(Sampler):
    abilities = frozenset({"forbid", "greedy"})

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._ends, self._forbidden = spec.stop_ids, list(spec.forbidden_ids)
        self._thread = ThreadPoolExecutor(1)  # the event loop stays free

    async def start(self) -> None:
        path = self.spec.model.path
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    async def sample(self, request: Request) -> Completion:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._sampled, request)

    @torch.no_grad()
    def _sampled(self, request: Request) -> Completion:
        noise = torch.Generator().manual_seed(request.seed)
        ends, ids, logps = {*self._ends, *request.call.stops}, list(request.ids), []
        while len(logps) < request.call.max_tokens and (not logps or ids[-1] not in ends):
            logits = self._model(torch.tensor([ids])).logits[0, -1] / self.spec.rollout.sampling.temperature
            logits[self._forbidden] = -torch.inf
            logp = logits.log_softmax(-1)
            token = logp.argmax() if request.is_greedy else torch.multinomial(logp.exp(), 1, generator=noise)
            ids.append(int(token))
            logps.append(float(logp[token]))
        new = ids[len(request.ids) :]
        return Completion(new, logps, [0] * len(new), stopped=new[-1] in self._ends)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
