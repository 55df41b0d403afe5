"""An agent of the benchmark `agents`: reverses a word, then its own answer, with the plain OpenAI SDK.

It works at 32 tasks at a time. The reward is the share of the two turns that are right.
"""

import asyncio
import os
from typing import Any

import aiohttp
import openai

NUM_AT_ONCE = 32


async def solve(task: dict[str, Any], policy: openai.AsyncOpenAI) -> float:
    """Two turns; the second continues the first."""
    messages: list[Any] = list(task["messages"])
    want, right = str(task["label"]), 0
    for _ in range(2):
        chat = await policy.chat.completions.create(model="policy", messages=messages)
        answer = chat.choices[0].message.content or ""
        right += answer == want
        want = answer[::-1]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"rev {answer}"}]
    return right / 2


async def work(http: aiohttp.ClientSession, policy: openai.AsyncOpenAI) -> None:
    """Tasks, one after the other."""
    tasks = {"Authorization": f"Bearer {os.environ['MYXA_TASKS_KEY']}"}
    while True:
        async with http.post("/v1/tasks/next", headers=tasks) as told:
            if told.status != 200:  # none at present
                continue
            task = await told.json()
        reward = await solve(task, policy.with_options(api_key=task["key"]))
        key = {"Authorization": f"Bearer {task['key']}"}
        async with http.post("/v1/session/end", headers=key, json={"reward": reward}):
            pass


async def main() -> None:
    """Until the run ends it."""
    async with (
        aiohttp.ClientSession(os.environ["MYXA_BASE_URL"]) as http,
        openai.AsyncOpenAI() as policy,
    ):
        await asyncio.gather(*(work(http, policy) for _ in range(NUM_AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(main())
