"""Measure what many agents at once cost the process of an engine: the real server, templates, tokens and conversations,
with a stub in place of the engine, and agents in another process.

Each agent makes calls one after the other; its conversation grows by an answer and an observation from call to call.
The stub answers random tokens after a fixed time. `cores` is the CPU time of the server's process over the wall time,
with reading, rendering and tokenising.

    python tools/bench/agents.py
    python tools/bench/agents.py --json --agents 1000 --calls 6 --answer-seconds 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER_TOKENS = 200
OBSERVATION_WORDS = 150
VOCABULARY = 8192


def tokenizer_of(texts: Sequence[str]) -> Any:
    """A byte-level BPE tokenizer with ChatML's marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=marks))
    return tokenizer


async def serve(options: argparse.Namespace) -> dict[str, Any]:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from megatron_rl.environments import FORMATS
    from megatron_rl.rollout.program import Call, Completion
    from megatron_rl.rollout.programs.conversations import Conversations
    from megatron_rl.rollout.programs.endpoint import Endpoint, TurnReading

    tokenizer = tokenizer_of([page.read_text() for page in ROOT.glob("docs/*.md")])
    template = ImmutableSandboxedEnvironment().from_string(TEMPLATE)
    end, draw = tokenizer.token_to_id("<|im_end|>"), random.Random(0)
    words = range(end + 300, tokenizer.get_vocab_size())  # whole words and parts of them

    async def ask(ids: list[int], call: Call) -> Completion:
        await asyncio.sleep(options.answer_seconds)
        answer = [*draw.choices(words, k=ANSWER_TOKENS), end]
        return Completion(answer, [-0.5] * len(answer), [0] * len(answer), True)

    def render(turns: Sequence[Any], tools: Sequence[Any], opens_answer: bool) -> str:
        return template.render(messages=turns, add_generation_prompt=opens_answer)

    reading = TurnReading(FORMATS["hermes"], "", lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))
    endpoint = Endpoint(reading, 1 << 20, {})
    await endpoint.start()
    lines = [endpoint.open(Conversations(render, tokenizer, ["<|im_end|>"]), ask) for _ in range(options.agents)]
    command = [sys.executable, __file__, "--calls", str(options.calls), "--play"]
    agents = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    start, cpu = time.monotonic(), time.process_time()
    told, _ = await agents.communicate(json.dumps([line.url for line in lines]).encode())
    wall, used = time.monotonic() - start, time.process_time() - cpu
    await endpoint.close()
    if agents.returncode:
        raise RuntimeError("the agents' process failed; see above")
    waited = [seconds - options.answer_seconds for seconds in json.loads(told)]
    found = [line.conversations.transcripts() for line in lines]
    return {
        "agents": options.agents,
        "calls": len(waited),
        "conversations": sum(map(len, found)),
        "tokens": sum(len(ids) + len(transcript.ids) for one in found for ids, transcript, _ in one),
        "seconds": wall,
        "cores": used / wall,
        "cpu_ms_per_call": 1e3 * used / len(waited),
        "waited_s": {"p50": quantiles(waited, n=100)[49], "p99": quantiles(waited, n=100)[98]},
    }


async def play(urls: Sequence[str], calls: int) -> list[float]:
    """The seconds of all calls of agents at these addresses."""
    import aiohttp

    async def agent(session: aiohttp.ClientSession, url: str) -> list[float]:
        turns, seconds = [{"role": "user", "content": f"Begin at {url}."}], []
        for number in range(calls):
            start = time.monotonic()
            async with session.post(f"{url}/chat/completions", json={"messages": turns}) as given:
                answered = await given.json()
            seconds.append(time.monotonic() - start)
            observation = " ".join(f"line {number} of the output" for _ in range(OBSERVATION_WORDS // 5))
            turns += [answered["choices"][0]["message"], {"role": "user", "content": observation}]
        return seconds

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        return sum(await asyncio.gather(*(agent(session, url) for url in urls)), [])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000, help="how many play at once")
    parser.add_argument("--calls", type=int, default=6, help="how often each asks the model")
    parser.add_argument("--answer-seconds", type=float, default=8.0, help="how long the stub takes for an answer")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.play:
        print(json.dumps(asyncio.run(play(json.loads(sys.stdin.read()), options.calls))))
        return 0
    found = asyncio.run(serve(options))
    if options.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        print(f"{name:16} {value if isinstance(value, int | dict) else round(value, 2)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
