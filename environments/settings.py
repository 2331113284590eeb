"""What a run is: which environment, how many episodes of it, and how the model is sampled."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

Mode = Literal["train", "eval"]
OF_LOOPS = ("messages", "model", "n", "stream", "stream_options", "tool_choice", "tools")
"""Parameters of chat completions that belong to the agent loop."""


class ToolServerSettings(BaseModel):
    """A server is a command that speaks over stdin and stdout, or a URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str | None = None
    """The program of a server that speaks over stdin and stdout."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    env: dict[str, str] = {}
    """Its variables."""
    cwd: str | None = None
    """The directory in which it runs."""
    url: str | None = None
    """The address of a server that runs already."""
    headers: dict[str, str] = {}
    """Headers of each request to this address."""
    transport: Literal["http", "sse"] = "http"
    """`sse` is for servers older than the streamable transport."""
    tools: tuple[str, ...] | None = None
    """The tools that the model may call; without it, all of them."""
    prefix: str = ""
    """What the names of the tools begin with for the model."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("a tool server has either a `command` or a `url`")
        return self


class RunSettings(BaseModel):
    """One run. Everything that a repetition needs is in it, and is written to `run.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: str
    """`LIBRARY:NAME`: `reasoning_gym:chain_sum`, `python:module:Class`, `openenv:http://HOST:PORT`, …."""
    options: dict[str, Any] = {}
    """What the environment is made with."""
    mode: Mode = "train"
    """`eval` judges, and nothing of it is trained."""
    model: str | None = None
    """The model to call; without it, the one that the gateway serves. `policy@12` pins version 12."""
    opponent: str | None = None
    """The model of all players but one in a game; without it, every player learns."""
    seed: int = 0
    """Of tasks, their order and the sampling."""
    tasks: Annotated[int, Field(ge=0)] = 0
    """How many tasks there are, played in a new order each time; with 0, every group has a new task."""
    group_size: PositiveInt = 8
    """How many episodes of a task are compared with each other."""
    concurrency: PositiveInt = 32
    """How many episodes run at once, those of evaluations included."""
    episodes: PositiveInt | None = None
    """The run ends after so many; without it, an evaluation plays each task once, a training goes on."""
    until_reward: float | None = None
    """The run ends when the mean reward of the last 128 episodes reaches this."""
    time_limit_s: PositiveFloat | None = None
    """The run ends after so many seconds."""

    max_turns: PositiveInt = 16
    """An episode with more answers is cut off."""
    episode_s: PositiveFloat = 600.0
    """An episode that takes longer is cut off."""
    step_s: PositiveFloat = 60.0
    """An episode whose environment takes longer for one step has failed, and its process is killed."""
    sampling: dict[str, Any] = {}
    """Parameters of chat completions, such as `max_tokens` and `temperature`."""

    skip_after: Annotated[int, Field(ge=0)] = 0
    """A task whose last so many groups had equal rewards is left out as many times; 0 plays every task."""
    stop_uniform_after: Annotated[int, Field(ge=0)] = 0
    """A group in which so many episodes ended with equal rewards ends early; 0 plays all of them."""
    tool_servers: dict[str, ToolServerSettings] = {}
    """MCP servers whose tools the model may call, beside those of the environment. `${NAME}` in a text is the
    runner's variable: settings are written to `run.json`, so keys belong there."""
    most_failed_groups: PositiveInt = 5
    """So many groups in a row in which every episode failed end the run."""
    graded_elsewhere: bool = False
    """Episodes without a reward wait for one, as of the reward service, instead of being `failed`."""

    eval_every: Annotated[int, Field(ge=0)] = 0
    """A training run has the model evaluated at its start, and after so many new versions; 0: never."""
    eval_tasks: PositiveInt = 64
    """How many tasks such an evaluation has."""
    eval_samples: PositiveInt = 1
    """How many episodes of each task."""
    eval_seed: int = 1000
    """Of its tasks, which are not those of the training."""
    eval_options: dict[str, Any] = {}
    """What its environment is made with, beside `options`."""
    eval_sampling: dict[str, Any] = {}
    """Its parameters of chat completions, beside `sampling`."""

    hosts: PositiveInt = 1
    """How many processes import the library; each begins the processes of its episodes."""
    python: Path | None = None
    """The interpreter that has the environment's library; without it, the one in `run/environments`."""
    wait_s: PositiveFloat = 300.0
    """How long a request or a model call is repeated while the gateway refuses it for load or does not
    answer, and how long episodes wait while an OpenEnv server lets none of them in."""

    @property
    def library(self) -> str:
        return self.environment.partition(":")[0]

    @property
    def name(self) -> str:
        return self.environment.partition(":")[2]

    @property
    def evaluation(self) -> Self:
        """The settings of an evaluation during this run."""
        return self.model_copy(
            update={
                "mode": "eval",
                "options": self.options | self.eval_options,
                "sampling": self.sampling | self.eval_sampling,
                "seed": self.eval_seed,
                "tasks": self.eval_tasks,
                "group_size": self.eval_samples,
                "eval_every": 0,
                "stop_uniform_after": 0,
                **dict.fromkeys(("episodes", "until_reward", "time_limit_s")),
            }
        )

    @field_validator("sampling", "eval_sampling")
    @classmethod
    def _leaves_calls_to_the_loop(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in OF_LOOPS if name in sampling]:
            raise ValueError(f"{', '.join(taken)} cannot be set here: the agent loop sets it")
        return sampling

    @field_validator("environment")
    @classmethod
    def _names_a_library(cls, environment: str) -> str:
        library, _, name = environment.partition(":")
        if not (library and name):
            raise ValueError(f"{environment!r} is not LIBRARY:NAME, such as reasoning_gym:chain_sum")
        return environment
