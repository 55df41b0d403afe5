"""An agent with a loop of its own and the plain OpenAI SDK. It knows nothing of the run but what its environment says.

It polls for tasks, 16 at a time, asks the policy to sort digits and then to sort its own answer again, and posts a
reward: the share of digits that are in their places.
"""

import asyncio
import os

import httpx
import openai

NUM_AT_ONCE = 16


def reward(answer: str, label: str) -> float:
    return sum(a == b for a, b in zip(answer, label, strict=False)) / max(len(answer), len(label))


async def solve(http: httpx.AsyncClient, task: dict) -> None:
    client = openai.AsyncOpenAI(base_url=task["openai_base_url"], api_key=task["key"], http_client=http)
    messages = list(task["messages"])
    answer = ""
    for _ in range(2):
        chat = await client.chat.completions.create(model="policy", messages=messages)
        answer = chat.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"sort {answer}"}]
    headers = {"Authorization": f"Bearer {task['key']}"}
    await http.post(
        f"{task['base_url']}/v1/session/end", headers=headers, json={"reward": reward(answer, task["label"])}
    )


async def work() -> None:
    headers = {"Authorization": f"Bearer {os.environ['MYXA_TASKS_KEY']}"}
    while True:
        async with httpx.AsyncClient(timeout=60) as http:
            told = await http.post(f"{os.environ['MYXA_BASE_URL']}/v1/tasks/next", headers=headers)
            if told.status_code == 200:
                await solve(http, told.json())


async def main() -> None:
    await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))


asyncio.run(main())
