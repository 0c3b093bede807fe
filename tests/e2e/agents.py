"""An agent as somebody else has written it: it knows nothing of this project, only an address."""

from __future__ import annotations

from openai import AsyncOpenAI


async def asks_twice(row, base_url):
    """Goes on from its first answer twice, differently."""
    if row["ground_truth"] == "fails":
        raise OSError("the disk is gone")
    texts = []
    async with AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as model:
        question = {"role": "user", "content": "1*2"}
        first = await model.chat.completions.create(model="policy", messages=[question], max_tokens=8)
        answer = first.choices[0].message.model_dump(exclude_none=True)
        for more in ("3", "4"):
            turns = [question, answer, {"role": "user", "content": more}]
            given = await model.chat.completions.create(model="policy", messages=turns, max_tokens=8)
            texts.append(given.choices[0].message.content)
    digits = sum(letter.isdigit() for letter in "".join(texts))
    return digits / max(len("".join(texts)), 1)
