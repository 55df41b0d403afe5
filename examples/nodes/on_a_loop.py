"""A node on an asyncio loop of your own. It prints

0.4
{'judge/0': 0.5, 'judge/1': 0.5}
"""

import asyncio

from judge import Judge, JudgeContract

from myxa.core.refs import together
from myxa.transport.node import Node


async def main() -> None:
    node = await Node.attach(name="service")
    await node.start(Judge(), "judge/0")
    await node.start(Judge(), "judge/1")
    print(await node.ref(JudgeContract, "judge/0").score("four"))
    judges = {name: node.ref(JudgeContract, name) for name in node.peers("judge/")}
    print(await together({name: judge.score("seven") for name, judge in judges.items()}))
    await node.close()


asyncio.run(main())
