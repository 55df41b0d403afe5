"""Kinds of environments, each by its package: what a worker process does in each phase of a session (`session.py`). A
package is imported by the class that needs it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import json
import logging
import re
import sys
import types
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...core.errors import ConfigError
from ...transport.address import LOOPBACK
from ..gateway.answering import fault_body
from ..gateway.exchange import STATUS, function_tool
from ..gateway.session import RequestFault
from ..user_code.functions import Expected, named_code, what_was_raised
from ..workflows.failures import EnvironmentFailure, SandboxFailure
from .session import TOO_LONG, Environment, EnvironmentSession, Message, Row

if TYPE_CHECKING:
    from aiohttp import web

GAME = Expected("environments.NAME.id", 0, "class Game: def reset(self, seed, options) ...; def step(self, action) ...")
TASKSET = Expected("environments.NAME.id", 0, "class Tasks(verifiers.v1.Taskset)")


_log = logging.getLogger(__name__)
_NUMBERS = re.compile(r"-?\d+")
MAX_DIGITS = 18
"""Of an action; Python refuses to read thousands."""


def fitting(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the named arguments that a function takes."""
    takes = inspect.signature(fn).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    return {name: value for name, value in arguments.items() if takes_all or name in takes}


class Game(Environment):
    """Gymnasium's interface: `reset`, `step`, `close`, and where they are there `tools`, `finalize`, `score`."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        super().__init__(name, args)
        self.make: Callable[..., Any]
        if ":" in name:
            self.make = named_code(name, GAME)
        else:
            gymnasium = importlib.import_module("gymnasium")
            gymnasium.spec(name)
            self.make = partial(gymnasium.make, name)

    async def setup(self, session: EnvironmentSession) -> None:
        session.env = env = await session.called(self.make, **self.args)
        options = {**session.row, **session.ctx.facts}
        result: Any = await session.called(env.reset, **fitting(env.reset, {"seed": session.seed, "options": options}))
        match result:
            case (observed, dict()):  # with what Gymnasium calls info
                await self._show(session, observed)
            case _:
                await self._show(session, result)

    async def run(self, session: EnvironmentSession) -> None:
        env, is_over = session.env, False
        while not is_over:
            tools: Any = getattr(env, "tools", ())
            tools = tools() if callable(tools) else tools
            message = await session.turn(tools)
            action = self._action(session, message, has_tools=bool(tools))
            if action is None:
                session.heard("That is no action. Answer with one number.")
                continue
            observed, reward, is_over, *more = await session.called(env.step, action)
            is_over = is_over or (len(more) > 1 and bool(more[0]))
            session.earned(reward)
            if not is_over:
                await self._show(session, observed)

    async def _show(self, session: EnvironmentSession, observed: Any) -> None:
        """An observation: messages, or a text; one that is neither as what `render` draws of it, or whole as Python
        writes it."""
        if (messages := _messages_in(observed)) is not None:
            session.messages += messages
            return
        if not isinstance(observed, str) and getattr(session.env, "render_mode", None) == "ansi":
            observed = await session.called(session.env.render)
        with np.printoptions(threshold=sys.maxsize):
            session.heard("" if observed is None else str(observed))

    def _action(self, session: EnvironmentSession, message: Message, *, has_tools: bool) -> Any:
        """A text; a number where actions are numbered; the whole message where there are tools."""
        if has_tools:
            return message
        space: Any = getattr(session.env, "action_space", None)
        text: str = message.get("content") or ""
        if (size := getattr(space, "n", None)) is None or not hasattr(space, "start"):
            return text
        numbers = [int(number) for number in _NUMBERS.findall(text)[-1:] if len(number) <= MAX_DIGITS]
        return next((number for number in numbers if space.start <= number < space.start + size), None)

    async def finalize(self, session: EnvironmentSession) -> None:
        if (finalize := getattr(session.env, "finalize", None)) is not None:
            await session.called(finalize)

    async def score(self, session: EnvironmentSession) -> None:
        session.reward = float(sum(session.turn_rewards.values()))
        if (score := getattr(session.env, "score", None)) is not None:
            session.reward = float(await session.called(score))

    async def teardown(self, session: EnvironmentSession) -> None:
        if (close := getattr(session.env, "close", None)) is not None:
            await session.called(close)


def _messages_in(observed: Any) -> list[Message] | None:
    """The messages that it is; None: it is anything else."""
    entries: list[Any] = cast("list[Any]", observed) if isinstance(observed, list) else [None]
    return entries if all(isinstance(entry, dict) and "role" in entry for entry in entries) else None


class Tools(Environment):
    """Servers of the Model Context Protocol: the model calls their tools until it answers without."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        super().__init__(name, args)
        self.mcp = importlib.import_module("mcp")
        if not hasattr(self.mcp, "Client"):
            raise ConfigError("the package mcp is older than 2.0", remedy="install a newer one")
        self.servers: dict[str, Any] = {
            name: self._server(name, options) for name, options in self.args["servers"].items()
        }

    def _server(self, name: str, options: Mapping[str, Any]) -> Any:
        if isinstance(options.get("url"), str):
            return options["url"]
        command = options.get("command")
        if not isinstance(command, list) or not command:
            remedy = 'write command = ["program", ...] or url = "http://..."'
            raise ConfigError(f"args.servers.{name} says no server", remedy=remedy)
        stdio = importlib.import_module("mcp.client.stdio")
        settings = {key: options[key] for key in ("env", "cwd") if key in options}
        return stdio.StdioServerParameters(command=command[0], args=command[1:], **settings)

    async def opened(self, enter: Callable[[Any], Awaitable[Any]]) -> dict[str, Any]:
        """The tools of all servers, by name, each with its client."""
        tools: dict[str, Any] = {}
        for server in self.servers.values():
            client = await enter(self.mcp.Client(server))
            cursor = None
            while True:
                listed = await client.list_tools(cursor=cursor)
                if twice := next((tool.name for tool in listed.tools if tool.name in tools), ""):
                    raise ValueError(f"args.servers: two tools are called {twice}, and the model could call one only")
                tools.update({tool.name: (client, tool) for tool in listed.tools})
                if (cursor := listed.next_cursor) is None:
                    break
        return tools

    async def setup(self, session: EnvironmentSession) -> None:
        session.env = await self.opened(session.entered)

    async def run(self, session: EnvironmentSession) -> None:
        while True:
            message = await session.turn(listed(session.env))
            calls: list[dict[str, Any]] = message.get("tool_calls") or []
            for call in calls:
                session.heard(await self.call(session.env, call["function"]), call)
            session.metadata["num_tool_calls"] = session.metadata.get("num_tool_calls", 0) + len(calls)
            if not calls and not message["is_malformed"]:
                return
            if not calls:
                session.heard("A tool call could not be read. Write it again, in the form that was shown.")

    async def call(self, tools: Mapping[str, Any], function: Mapping[str, Any]) -> str:
        """What a tool answers, its errors included."""
        if function["name"] not in tools:
            return f"there is no tool {function['name']}"
        client, tool = tools[function["name"]]
        arguments: Any = json.loads(function["arguments"] or "null") or {}
        if not isinstance(arguments, dict):
            return f"error: the arguments of {tool.name} are no JSON object"
        try:
            result = await client.call_tool(tool.name, arguments)
        except self.mcp.MCPError as error:
            if error.code not in MODELS_FAULTS:
                raise
            return f"error: {error}"
        text = "\n".join(map(text_of, result.content))
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content)
        return f"error: {text}" if result.is_error else text


def text_of(content: Any) -> str:
    """A part of what a tool answers; of one that is no text, such as an image, its kind and where it is."""
    text = getattr(content, "text", getattr(getattr(content, "resource", None), "text", None))
    return f"[{content.type} {getattr(content, 'uri', '')}".rstrip() + "]" if text is None else text


def listed(tools: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As chat templates know them."""
    return [function_tool(tool.name, tool.description, tool.input_schema) for _, tool in tools.values()]


MODELS_FAULTS = (-32601, -32602)
"""Codes of JSON-RPC: there is no such method; invalid parameters."""


class Puzzles(Environment):
    """`reasoning_gym`: questions made from a seed, one answer each, scored by the task itself."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        super().__init__(name, args)
        package = importlib.import_module("reasoning_gym")
        self.extract = importlib.import_module("reasoning_gym.utils").extract_answer
        self.tasks = package.create_dataset(name, **{"seed": 0, **self.args})  # else each process has tasks of its own

    def rows(self) -> Iterable[Row]:
        for index, task in enumerate(self.tasks):
            yield {
                "prompt": [{"role": "user", "content": task["question"]}],
                "label": str(task["answer"]),
                "metadata": {"index": index},
            }

    async def run(self, session: EnvironmentSession) -> None:
        session.env = await session.turn()

    async def score(self, session: EnvironmentSession) -> None:
        turn: Message = session.env or {}  # None: the context had no room for an answer
        text: str = turn.get("content") or ""
        answer, task = self.extract(text), self.tasks[session.row["metadata"]["index"]]
        answer_text = text.strip() if answer is None else answer
        try:
            session.reward = float(await session.called(self.tasks.score_answer, answer_text, task))
        except Exception as error:  # noqa: BLE001 -- such as ValueError of int(): the answer is no number
            session.reward = 0.0
            _log.warning("%s: an answer that cannot be scored earns 0: %s", self.name, what_was_raised(error))


class OpenEnv(Environment):
    """A server of OpenEnv. Its tools are called, or an action is the fields of its schema: JSON, or the only field."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        super().__init__(name, args)
        self.client = importlib.import_module("openenv").GenericEnvClient  # which takes many seconds to import

    async def setup(self, session: EnvironmentSession) -> None:
        client = self.client(base_url=self.name, **self.args.get("client", {}))
        session.env = await session.entered(client)
        schema = (await session.called(_json_at, f"{self.name.rstrip('/')}/schema"))["action"]
        session.metadata["fields"] = schema.get("required", [])
        options: dict[str, Any] = {**self.args.get("reset", {}), **session.row["metadata"].get("reset", {})}
        result = await session.env.reset(**{"seed": session.seed, **options})
        session.tools = []
        if schema.get("title") in ("Action", "CallToolAction", "ListToolsAction"):
            listed = (await session.env.step({"type": "list_tools"})).observation["tools"]
            session.tools = [function_tool(tool["name"], tool["description"], tool["input_schema"]) for tool in listed]
        session.heard(self._text(result.observation))

    async def run(self, session: EnvironmentSession) -> None:
        is_over = False
        while not is_over:
            message = await session.turn(session.tools)
            calls: list[dict[str, Any]] = message.get("tool_calls") or []
            try:
                actions = [self._call(call["function"]) for call in calls] or [self._action(session, message)]
            except ValueError as error:
                session.heard(f"That is no action: {error}")
                continue
            for action, call in itertools.zip_longest(actions, calls):
                if is_over:  # no step follows the last one
                    break
                try:
                    result = await session.env.step(action)
                except RuntimeError as error:
                    if "VALIDATION_ERROR" not in str(error):
                        raise
                    session.heard(f"That is no action: {error}", call)
                    continue
                session.earned(result.reward or 0.0)
                is_over = is_over or bool(result.done)
                session.heard(self._text(result.observation), call)
            is_over = is_over or (bool(session.tools) and not calls)

    def _call(self, function: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "call_tool", "tool_name": function["name"], "arguments": json.loads(function["arguments"])}

    def _action(self, session: EnvironmentSession, message: Message) -> dict[str, Any]:
        """Raises ValueError."""
        text, fields = (message.get("content") or "").strip(), session.metadata["fields"]
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(action := json.loads(text), dict):
                return cast("dict[str, Any]", action)
        if len(fields) != 1:
            raise ValueError(f"write a JSON object with the fields {', '.join(fields)}")
        return {fields[0]: text}

    def _text(self, observation: Any) -> str:
        facts = {key: value for key, value in observation.items() if key not in ("done", "reward", "metadata")}
        texts = [value for value in facts.values() if isinstance(value, str)]
        return texts[0] if len(texts) == len(facts) == 1 else json.dumps(facts, default=str)

    async def score(self, session: EnvironmentSession) -> None:
        session.reward = float(sum(session.turn_rewards.values()))


def _json_at(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


class Verifiers(Environment):
    """Tasksets and environments of `verifiers`. Their agents get an endpoint of this process; by default a chat loop in
    it is their harness. `args` are the table `env` of their own configuration."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        if ":" in name:
            name = named_code(name, TASKSET).__module__
        super().__init__(name, args)
        vf = self.vf = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        module = sys.modules[CHAT_HARNESS] = types.ModuleType(CHAT_HARNESS)
        module.__all__, module.ChatLoop = ["ChatLoop"], _chat_loop(vf)  # type: ignore[attr-defined]
        config = {
            "interception": {"type": "server"},
            **self.args,
            "taskset": {**self.args.get("taskset", {}), "id": name},
        }
        kind = loaders.env_config_type(name, config.get("id", ""))
        seats = [key for key, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
        for seat in seats:
            config[seat] = {"harness": {"id": CHAT_HARNESS}, "runtime": {"type": "subprocess"}, **config.get(seat, {})}
        num_rows = config.pop("num_rows", 1000)
        self.env = loaders.load_environment(loaders.resolve_env_config(config))
        self.tasks = list(self.env.taskset.take(num_rows))
        self.sessions: dict[str, EnvironmentSession] = {}
        """By the ids of their traces."""

    def rows(self) -> Iterable[Row]:
        for index, task in enumerate(self.tasks):
            data = task.data
            prompt = data.prompt if data.prompt is not None else data.name or f"task {index}"
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else plain_messages(prompt)
            head = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
            yield {
                "prompt": [*head, *messages],
                "metadata": {"index": index, "task": data.name or data.id or str(index)},
            }

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        from aiohttp import web  # which takes as long as all else

        from ..gateway.server import MAX_BODY_BYTES

        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/{path:.*}", self._answered)
        server = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await server.setup()
        stack.push_async_callback(server.cleanup)
        await web.TCPSite(server, LOOPBACK, 0).start()
        url = f"http://{LOOPBACK}:{server.addresses[0][1]}/v1"
        client = self.vf.EvalClientConfig(base_url=url, api_key_var="MYXA_NO_KEY")
        self.ctx = self.vf.ModelContext(model="policy", client=client, sampling=self.vf.SamplingConfig())
        await stack.enter_async_context(self.env.serving())

    async def _answered(self, request: web.Request) -> web.Response:
        """As the policy does; a header says which session asks."""
        from aiohttp import web

        session, path = self.sessions.get(request.headers.get("X-Session-ID", "")), request.path
        try:
            if session is None:
                raise RequestFault("auth", "there is no such session")
            return web.json_response(await session.ask(await request.read(), path))
        except RequestFault as fault:
            if session is not None and fault.kind == "too-long":
                session.metadata["ended_by"] = TOO_LONG
            return web.json_response(fault_body(path, fault), status=STATUS[fault.kind])

    async def run(self, session: EnvironmentSession) -> None:
        def minted(trace: Any) -> None:
            self.sessions[trace.id] = session
            traces.append(trace.id)

        traces: list[str] = []
        task = self.tasks[session.row["metadata"]["index"]]
        try:
            episode = await self.env.run_episode(task, self.ctx, on_trace=minted)
        finally:
            for trace_id in traces:
                del self.sessions[trace_id]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors and not session.metadata.get("ended_by"):
            kind = SandboxFailure if errors[0].type == "SandboxError" else EnvironmentFailure
            raise kind(f"{errors[0].type}: {errors[0].message}")
        rewards = [trace.reward for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        session.reward = float(sum(rewards) / max(len(rewards), 1))
        for trace in episode.traces:
            session.metadata.update({key: value for key, value in trace.metrics.items() if value is not None})
            session.metadata.update({key: reward.value for key, reward in trace.rewards.items() if reward is not None})


CHAT_HARNESS = "myxa_chat"


def plain_messages(messages: Iterable[Any]) -> list[Message]:
    to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
    return [to_wire(message) for message in messages]


def _chat_loop(vf: Any) -> type:
    """A harness in this process: the model answers, and calls tools of servers until it answers without."""

    class ChatLoop(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else plain_messages(prompt)
            head = {"Authorization": f"Bearer {secret}"}
            urls = {name: {"url": url} for name, url in mcp_urls.items()}
            servers: Any = Tools("", {"servers": urls}) if urls else None
            async with contextlib.AsyncExitStack() as stack:
                http = await stack.enter_async_context(
                    importlib.import_module("httpx").AsyncClient(timeout=None, verify=False)
                )
                tools: dict[str, Any] = await servers.opened(stack.enter_async_context) if servers else {}
                options = {"tools": listed(tools)} if tools else {}
                while True:
                    body = {"model": ctx.model, "messages": messages, **options}
                    answer = await http.post(f"{endpoint}/chat/completions", json=body, headers=head)
                    if answer.status_code != 200:
                        return vf.ProgramResult(1, "", answer.text)
                    message = answer.json()["choices"][0]["message"]
                    messages.append({key: value for key, value in message.items() if value is not None})
                    calls: list[dict[str, Any]] = message.get("tool_calls") or []
                    for call in calls if servers else ():
                        text = await servers.call(tools, call["function"])
                        messages.append({"role": "tool", "content": text, "tool_call_id": call["id"]})
                    if not calls or not servers:
                        return vf.ProgramResult(0, "", "")

    return ChatLoop


ENVIRONMENTS: dict[str, type[Environment]] = {
    "gym": Game,
    "mcp": Tools,
    "openenv": OpenEnv,
    "reasoning_gym": Puzzles,
    "verifiers": Verifiers,
}
