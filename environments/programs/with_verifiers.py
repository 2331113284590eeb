"""`verifiers:TASKSET` or `verifiers:ENV+TASKSET`: an environment of verifiers 0.4, which its harness plays.

The library calls the model at the gateway with the id of the agent's trace in the header `X-Session-ID`. Each
trace gets the id of the session that the runner has opened for it, so its calls belong to that session from
the first one on.

options  harness   the agent's program: its name, or its settings; `null` is the plain chat loop
         runtime   where the program runs: a name or settings; without it, in processes of this machine
         client    "eval" relays what the harness says; "train" has the library render it as token ids
         renderer, renderer_model_name      of the client "train"
         traces    how many traces an agent has in an episode, such as {"agent": 4} for best-of-n
         taskset   more settings of the taskset
         env       more settings of the environment, such as those of one agent
         max_turns the most answers of an agent for which `env` names no limit
         wait_s    how long a model call is repeated; the runner sets it
"""

import asyncio
import itertools
import os
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import host_answers
import httpx
import verifiers.v1 as vf
from patience import PatientClient
from verifiers.v1.agent import Agents
from verifiers.v1.clients import ModelContext, base
from verifiers.v1.clients import eval as relaying
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.runtimes import SubprocessConfig, make_runtime
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

KEY = "WEIR_API_KEY"
"""The variable with the key of the gateway. The library gives no variable of such a name to a harness."""


def library(name: str, options: dict[str, Any]) -> "TracedEpisodes":
    return TracedEpisodes(name, options)


class TracedEpisodes:
    """One environment, whose serving resources live as long as its host."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name, self._options = name, options
        be_patient(options["wait_s"])
        self._environment = load_environment(config_of(name, options))
        self._names = [
            agent
            for agent in agent_config_fields(self._environment.config)
            for _ in range((options.get("traces") or {}).get(agent, 1))
        ]
        self._drawn: list[vf.Task] = []
        self._tasks = iter(self._environment.taskset)
        self._client: EvalClientConfig | TrainClientConfig | None = None
        self._open = AsyncExitStack()

    async def start(self) -> None:
        await self._open.enter_async_context(self._environment.serving())

    async def stop(self) -> None:
        await self._open.aclose()

    async def describe(self) -> dict[str, Any]:
        frozen = await self._frozen_agents()
        return {
            "name": f"verifiers:{self._name}",
            "version": vf_version(),
            "players": len(self._names),
            "frozen": [seat for seat, agent in enumerate(self._names) if agent in frozen],
            "task_count": self._count() if self._environment.taskset.bounded else None,
        }

    async def tasks(self, seed: int, start: int, count: int) -> list[dict[str, Any]]:
        drawn = [self._task(number) for number in range(start, start + count)]
        return [
            {"id": task.key, "data": {"number": number}}
            for number, task in enumerate(drawn, start)
            if task is not None
        ]

    async def play(
        self,
        data: dict[str, Any],
        sessions: list[str],
        base_url: str,
        api_key: str,
        model: str,
        sampling: dict[str, Any],
    ) -> dict[str, Any]:
        """Play an episode. `sessions[s]` is the session of the trace in seat s."""
        (slot,) = self._environment.slots(self._task(data["number"]))
        free = {agent: self._seats_of(agent) for agent in self._names}

        surplus: list[str] = []

        def name_trace(trace: vf.Trace) -> None:
            seat = next(free[trace.agent.name], None)
            if seat is None:
                surplus.append(f"{trace.agent.name!r} has more traces in an episode than the option `traces`")
                raise RuntimeError(surplus[-1])
            trace.id = sessions[seat]

        os.environ[KEY] = api_key
        context = ModelContext(
            model=model, client=self._client_of(base_url), sampling=SamplingConfig(**sampling)
        )
        episode = await self._environment.run_slot(slot, context, on_trace=name_trace)
        return {
            "ok": episode.ok,
            "errors": [*surplus, *errors_of(episode)],
            "traces": [told(trace) for trace in episode.traces],
        }

    def _seats_of(self, agent: str) -> Any:
        return iter([seat for seat, name in enumerate(self._names) if name == agent])

    def _client_of(self, base_url: str) -> EvalClientConfig | TrainClientConfig:
        """One configuration for all episodes, because the library keeps a client for each until it ends."""
        if self._client is None:
            endpoint = {"base_url": base_url, "api_key_var": KEY}
            if self._options.get("client", "eval") == "eval":
                self._client = EvalClientConfig(**endpoint)
            else:
                rendered = {
                    name: self._options[name]
                    for name in ("renderer", "renderer_model_name")
                    if name in self._options
                }
                if isinstance(rendered.get("renderer"), str):
                    rendered["renderer"] = {"name": rendered["renderer"]}
                self._client = TrainClientConfig(**endpoint, **rendered)
        return self._client

    async def _frozen_agents(self) -> set[str]:
        """The agents that the environment never trains, such as the user of a conversation."""
        agents = Agents(self._environment.config, lambda name, spec: SimpleNamespace(trainable=True))
        await self._environment.setup(agents)
        return {name for name in self._names if not getattr(agents, name).trainable}

    def _count(self) -> int:
        self._drawn.extend(self._tasks)
        return len(self._drawn)

    def _task(self, number: int) -> vf.Task | None:
        """The task in this place of the taskset; None after the last one."""
        if number >= len(self._drawn):
            self._drawn.extend(itertools.islice(self._tasks, number + 1 - len(self._drawn)))
        return self._drawn[number] if number < len(self._drawn) else None


def be_patient(waits_s: float) -> None:
    """Have the library make a model call again. It has no setting for that, and leaves it to the harness, of
    which most give up after some seconds."""

    def client(config: Any) -> httpx.AsyncClient:
        limits = {"timeout": httpx.Timeout(**config.timeout.model_dump()), "limits": base.DEFAULT_LIMITS}
        return PatientClient(waits_s, time.monotonic, asyncio.sleep, **limits)

    base.build_async_httpx = relaying.build_async_httpx = client


def config_of(name: str, options: dict[str, Any]) -> Any:
    """The settings of the environment. What `options` say of all agents holds for those that say nothing of
    it themselves. The library's own runtime is its vendor's cloud, so without a word it is this machine."""
    environment, plus, taskset = name.rpartition("+")
    given = {"id": environment} if plus else {}
    given |= {"taskset": {"id": taskset, **(options.get("taskset") or {})}, **(options.get("env") or {})}
    known = agent_config_fields(resolve_env_config(given))
    for agent, spec in known.items():
        own = dict(given.get(agent) or {})
        if "runtime" not in spec.model_fields_set:
            own.setdefault("runtime", named(options.get("runtime", "subprocess"), "type"))
        if "harness" in options and spec.harness is None:
            own.setdefault("harness", named(options["harness"] or "null", "id"))
        if "max_turns" in options and spec.max_turns is None:
            own.setdefault("max_turns", options["max_turns"])
        given[agent] = own
    return resolve_env_config(given)


def named(given: Any, field: str) -> dict[str, Any]:
    return {field: given} if isinstance(given, str) else dict(given)


def told(trace: vf.Trace) -> dict[str, Any]:
    """What the runner needs of a trace. A reward of None was not computed."""
    rewards = {
        name: None if reward is None else host_answers.number(reward.value)
        for name, reward in trace.rewards.items()
    }
    return {
        "session_id": trace.id,
        "agent": trace.agent.name,
        "trained": trace.agent.trainable,
        "ok": trace.ok,
        "errors": errors_of(trace),
        "truncated": trace.is_truncated,
        "late": trace.is_timeout,
        "stopped_by": trace.stop_condition,
        "rewards": rewards,
        "metrics": host_answers.metrics(
            {name: value for name, value in trace.metrics.items() if value is not None}
        ),
        "turns": trace.num_turns,
    }


def errors_of(record: Any) -> list[str]:
    return [f"{error.type}: {error.message}" for error in record.errors]


def vf_version() -> str:
    from importlib.metadata import version

    return version("verifiers")


def prepare() -> None:
    """Install the packages of the chat loop, and lock them beside its script: then no episode has to wait for
    a package index, or needs one."""
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

    async def install() -> None:
        runtime = make_runtime(SubprocessConfig(), name=f"weir-{os.getpid()}")
        await runtime.start()
        try:
            *_, script = await runtime.prepare_uv_script(CHAT_PROGRAM_SOURCE)
            locked = await runtime.run(["uv", "lock", "-q", "--no-config", "--script", script], {})
        finally:
            await runtime.stop()
        if locked.exit_code:
            raise RuntimeError(f"the packages of the chat loop cannot be locked: {locked.stderr}")

    asyncio.run(install())
