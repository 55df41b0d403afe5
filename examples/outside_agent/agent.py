"""An agent with a loop of its own and the plain OpenAI SDK. It knows of the run only what its environment says.

It polls for tasks, 16 at a time, asks the policy to sort digits and then to sort its own answer again, and posts a
reward: the share of digits that are in their places.
"""

import asyncio
import os

import aiohttp
import openai

NUM_AT_ONCE = 16


def reward(answer: str, label: str) -> float:
    return sum(a == b for a, b in zip(answer, label, strict=False)) / max(len(answer), len(label))


async def solve(task: dict) -> float:
    messages = list(task["messages"])
    answer = ""
    async with openai.AsyncOpenAI(base_url=task["openai_base_url"], api_key=task["key"]) as policy:
        for _ in range(2):
            chat = await policy.chat.completions.create(model="policy", messages=messages)
            answer = chat.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"sort {answer}"}]
    return reward(answer, task["label"])


async def work(http: aiohttp.ClientSession) -> None:
    tasks = {"Authorization": f"Bearer {os.environ['MYXA_TASKS_KEY']}"}
    while True:
        async with http.post("/v1/tasks/next", headers=tasks) as told:
            if told.status != 200:  # none at present
                continue
            task = await told.json()
        end, key = {"reward": await solve(task)}, {"Authorization": f"Bearer {task['key']}"}
        async with http.post("/v1/session/end", headers=key, json=end):
            pass


async def main() -> None:
    async with aiohttp.ClientSession(os.environ["MYXA_BASE_URL"]) as http:
        await asyncio.gather(*(work(http) for _ in range(NUM_AT_ONCE)))


asyncio.run(main())
