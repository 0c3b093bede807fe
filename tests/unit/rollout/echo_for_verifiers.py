"""A taskset of the library verifiers, with a harness that asks the model twice, without a process of its own."""

from __future__ import annotations

import verifiers.v1 as vf
from openai import AsyncOpenAI


class Data(vf.TaskData):
    answer: str


class EchoTask(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Echoes(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self):
        return [EchoTask(Data(prompt="a", answer="4"), self.config.task)]


class Twice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        turns = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as model:
            for text in ("again", ""):
                given = await model.chat.completions.create(model=ctx.model, messages=turns)
                print("what an environment prints is no reply")
                turns += [{"role": "assistant", "content": given.choices[0].message.content}]
                turns += [{"role": "user", "content": text}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Echoes", "Twice"]
