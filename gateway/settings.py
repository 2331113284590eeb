"""The gateway's settings, with their defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rollout_queue.contract.records import ReasoningEffort, SamplingMode, inexact
from rollout_queue.contract.serving_plan import CanaryGates, Sticky
from rollout_queue.http.bounded_protocol import ConnectionBounds
from rollout_queue.protocol.conditions import NOTHING_TRAINED_S, TRAINER_SILENT_S
from rollout_queue.redis.session_heads import CACHE_BYTES
from rollout_queue.redis.settings import WriterRedisSettings
from rollout_queue.settings import (
    BOUND,
    FOR_TESTS,
    TUNED,
    CommaSeparated,
    HttpSettings,
    ServiceKey,
    SettingsPart,
)
from rollout_queue.tracing import OtelSettings


class SamplingSettings(SettingsPart):
    """Sampling parameters of sessions that set none. Recorded logprobs are exact if `top_p` is 1, and
    `temperature` above 0."""

    mode: SamplingMode = "exact"
    """Whose parameters apply. `exact`: the call's temperature if it is above 0, and else these; `enforce`:
    these; `default`: the call's, and these where the call has none; `allow`: as `default`, and the call's
    penalties as well."""
    temperature: float = Field(1.0, ge=0, le=2)
    """The temperature of sessions that set none."""
    top_p: float = Field(1.0, gt=0, le=1)
    """The smallest set of tokens with this probability is sampled from; 1: all."""


class LimitSettings(SettingsPart):
    """Limits on calls and new sessions. Beyond one, a request gets a 429 with `Retry-After`; null: no limit.

    All gateways on one Redis count together, and share their counts every `poll_every_s`. A single gateway
    keeps a limit exactly. Several may exceed it by the requests that arrive within `poll_every_s`.
    """

    requests_per_minute: int | None = Field(None, ge=1)
    """Model calls per client key; calls with a session key count for the key that made the session. A key may
    make as many writes beside them: sessions, rewards, ends, and what the Tinker SDK stores."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """Tokens per client key, prompts and answers as `usage` counts them. A call is admitted while any tokens
    are left. It may use more tokens than are left; later calls are then refused for longer."""
    burst_s: Annotated[float, TUNED] = Field(60.0, gt=0)
    """A client that paused may use this many seconds of its rate at once."""
    open_sessions: int | None = Field(None, ge=1)
    """Sessions in state `open`, in the whole deployment."""
    open_sessions_per_key: int | None = Field(None, ge=1)
    """The same for the sessions of one client key."""
    staleness_versions: int | None = Field(None, ge=0)
    """Policy versions that may pass from a session's opening to its training; set it to the trainer's
    `algorithm.max_staleness` or lower. New sessions for training are refused while more rollouts wait than
    the trainer takes for that many versions; 0 admits only the sessions of its next step. No limit until a
    trainer has reported."""
    queue_entries: int | None = Field(None, ge=1)
    """New sessions are refused while the trainer's stream has at least this many records."""
    queue_memory: float | None = Field(0.9, gt=0, le=1)
    """New sessions are refused while Redis uses at least this share of its `maxmemory`. The rest is for
    sessions that are open. No limit where Redis has no `maxmemory`."""


class WarningSettings(SettingsPart):
    """When `GET /admin/status` warns."""

    trainer_silent_s: float = Field(TRAINER_SILENT_S, gt=0)
    """Warn when the trainer has sent no status for this long."""
    nothing_trained_s: float = Field(NOTHING_TRAINED_S, gt=0)
    """Warn when sessions ended, but none was trained for this long."""
    recent_sessions: Annotated[int, TUNED] = Field(200, ge=1)
    """`untrained_share` and `expired_share` are shares of this many sessions, those that ended last. They
    warn only once a tenth of this number has ended."""
    untrained_share: float = Field(0.8, gt=0, le=1)
    """Warn when this share of the recent sessions was not trained."""
    expired_share: float = Field(0.1, gt=0, le=1)
    """Warn when this share of the recent sessions expired."""
    queue_share: float = Field(0.8, gt=0, le=1)
    """Warn when the queue uses this share of `limits.queue_entries` or `limits.queue_memory`."""


class CanarySettings(SettingsPart):
    """The defaults of a canary: which calls it answers, what it has to show. A null bound is not judged."""

    share: float = Field(0.1, gt=0, lt=1)
    """The share of the new groups that it answers."""
    sticky: Sticky = "group"
    """What is never divided between two versions: group, session."""
    min_groups: int = Field(10, ge=3, le=5000)
    """How many of its groups have to end before it can be promoted."""
    max_kl: float | None = Field(0.1, gt=0)
    """The mean KL divergence from the served version, in nats a token."""
    max_reward_drop: float | None = Field(0.1, ge=0)
    """How much lower the mean reward of a group may be."""
    max_error_increase: float | None = Field(0.05, ge=0, le=1)
    """How much higher the share of failed calls may be."""
    max_length_change: float | None = Field(0.5, gt=0)
    """By which factor, above 1, answers may become longer or shorter."""
    deadline_s: float = Field(3600.0, gt=0)
    """How long it may take to load, and then be open. Then it is rolled back."""

    def gates(self, **others: float | None) -> CanaryGates:
        """The bounds, except `others`."""
        return CanaryGates(**(self.model_dump(exclude={"share", "sticky"}) | others))


class ImageSettings(SettingsPart):
    """Images in the requests of agents, for models that read them."""

    hosts: CommaSeparated = []
    """Hosts, with their port if it is not the scheme's, from which images are fetched that a request names by
    an http or https address. From no other host, and from none inside a private network."""
    max_images: Annotated[int, BOUND] = Field(32, ge=1)
    """Images of one conversation."""
    max_bytes: int = Field(20 * 2**20, ge=1)
    """Bytes of one image, as the client sends it."""
    max_pixels: Annotated[int, BOUND] = Field(2**25, ge=1)
    """Pixels of one image, before it is resized. One is decoded in about 10 bytes a pixel; two at once."""
    fetch_timeout_s: Annotated[float, FOR_TESTS] = Field(10.0, gt=0)
    cache_bytes: Annotated[int, TUNED] = Field(64 * 2**20, ge=0)
    """Memory for decoded images, which agents send again with every call."""


class TinkerSettings(SettingsPart):
    """The interface of the Tinker SDK (`/api/v1`)."""

    base_model: str | None = None
    """The name by which clients know the base model, and load its tokenizer: a name on the Hugging Face hub,
    or a directory on their machine. Null: `model_path`."""
    max_log_bytes: Annotated[int, BOUND] = Field(256 * 2**20, ge=2**20)
    """What the commands and the unread results of all models may take in Redis, at most an eighth of its
    `maxmemory`. The model whose command is the oldest may take as much again."""
    session_timeout_s: Annotated[float, FOR_TESTS] = Field(1800.0, gt=0)
    """The models of a client without a sign of life for so long are freed; checkpoints stay. The SDK sends
    one every 10 s while its process lives."""
    session_retention_s: Annotated[float, FOR_TESTS] = Field(7 * 86400.0, gt=0)
    """How long the records of a client session stay after its models have ended: what it sampled from, and
    which commands it sent. A model with named weights stays."""
    max_samples: Annotated[int, BOUND] = Field(2000, ge=1)
    """How many sequences one gateway process samples at once; half of them for one client key."""
    sample_patience_s: Annotated[float, FOR_TESTS] = Field(600.0, ge=0)
    """How long a sample is tried again while no engine can make it."""
    poll_s: Annotated[float, FOR_TESTS] = Field(25.0, gt=0, le=40)
    """How long a poll waits for its result. The SDK gives up after 45 s."""


class PageSettings(SettingsPart):
    """The operators' page, `GET /`."""

    enabled: bool = True
    """Without the page, its paths are a 404, and no cookie opens anything."""
    idle_s: float = Field(8 * 3600.0, ge=60)
    """Whoever signed in has to sign in again after so long without a request of the page."""
    longest_s: Annotated[float, FOR_TESTS] = Field(24 * 3600.0, ge=60)
    """The same, whether or not there were requests."""
    sessions_per_key: Annotated[int, BOUND] = Field(20, ge=1, le=1000)
    """How many browsers may be signed in with one secret; one more signs the oldest out."""
    every_s: Annotated[float, FOR_TESTS] = Field(2.0, ge=0.1)
    """How often the page gets a new picture of the deployment, while somebody looks at it."""
    viewers: Annotated[int, BOUND] = Field(64, ge=1, le=4096)
    """How many browsers one gateway process sends pictures to. A further one gets a 429."""


class WrongKeySettings(SettingsPart):
    """How many requests with a wrong key each gateway process answers with a 401. A further one gets a 429,
    and gets it late. A request with a valid key is never refused for it."""

    per_address: int = Field(60, ge=1)
    """For one address of a client, at once and then in a minute. All clients behind one proxy have the
    proxy's address."""
    in_all: int = Field(600, ge=1)
    """For all addresses together."""
    delay_s: float = Field(1.0, ge=0, le=30)
    """How late the 429 comes. A connection carries one request at a time, so this slows whoever guesses."""


class ConcurrencySettings(SettingsPart):
    """How many calls a rollout server may have at once, from all gateways. Further calls wait in the gateway,
    for at most `engine_wait_s`."""

    adaptive: bool = True
    """Have a limit for each server, from what its engine reports. Engines that report no load have none."""
    first: Annotated[int, TUNED] = Field(64, ge=1)
    """The limit of a server that has just joined."""
    least: Annotated[int, TUNED] = Field(4, ge=1)
    most: Annotated[int, TUNED] = Field(4096, ge=1)
    """The bounds of each limit."""
    kv_target: Annotated[float, TUNED] = Field(0.8, gt=0, le=1)
    """The limit grows until running calls have this share of the engine's key-value cache."""
    kv_high: Annotated[float, TUNED] = Field(0.9, gt=0, le=1)
    """Above this share the limit shrinks."""
    shrink: Annotated[float, TUNED] = Field(0.9, gt=0, lt=1)
    """The factor by which it shrinks."""

    @model_validator(mode="after")
    def _ordered(self) -> "ConcurrencySettings":
        if self.least > self.most:
            raise ValueError("least: must not be above most")
        if self.kv_target > self.kv_high:
            raise ValueError("kv_target: must not be above kv_high")
        return self


class GatewaySettings(HttpSettings, WriterRedisSettings):
    """Section `gateway` of weir.yaml."""

    section: ClassVar[str] = "gateway"
    retired: ClassVar[Mapping[str, str]] = {
        "engine_http": "there is one client for engines",
        "redis_connection": "there is one kind of connection to Redis",
    }

    otel: OtelSettings | None = None
    """Traces; null: none."""
    port: int = 8000
    workers: int = Field(1, ge=1, le=64)
    """Processes that share the port. Each takes one core, and has its share of the bounds on connections,
    bodies, answers in the background and cached sessions. `--workers` counts first."""
    public_url: str | None = None
    """The address that agents use, in `base_url` of new sessions; default: the address of the request."""
    session_cache_bytes: Annotated[int, TUNED] = Field(CACHE_BYTES, ge=0)
    """Memory for the sessions that were called last, so that a call need not read its session from Redis."""
    model_path: Path
    """Directory in Hugging Face's format. The gateway reads config.json and the tokenizer, no weights."""
    model_name: str = "policy"
    strict_models: bool = False
    """Refuse model names other than `model_name`; if false, the policy answers under every name."""
    renderer: str = "auto"
    """Chat-template family, by its name in the library `renderers`, or own-template: the one beside the
    model's tokenizer. auto: from the model's name or type, and its own template for an unknown type, or if
    it writes other prompts than the family."""
    tool_prompt: Literal["none", "hermes"] = "none"
    """How tools are written for a model whose own template writes none. none: calls with tools are refused;
    hermes: in the system prompt, in Hermes' form (`<tools>`, `<tool_call>`)."""
    thinking: Literal["auto", "template", "all"] = "auto"
    """Earlier reasoning in prompts. `template`: the chat template decides; `all`: kept, so turns extend;
    `auto`: `all` if the template has an option for that, else `template`."""
    reasoning_effort: ReasoningEffort | None = None
    """The effort of sessions that choose none; null leaves it to the chat template. `none`: no thinking."""
    unknown_fields: Literal["report", "refuse"] = "report"
    """Fields of calls that the gateway has never heard of. `report`: it ignores them, and names them in the
    reply's header `x-weir-ignored-fields` and in the turn; `refuse`: the call is a 400."""
    context_length: int | None = None
    """Limit on tokens of prompt and answer together; default: the limit in the model's config."""
    sampling: SamplingSettings = SamplingSettings()
    train_constrained: bool = True
    """Train turns whose answer a grammar constrained (`tool_choice`, `response_format`). Their logprobs are
    those of the constrained distribution, which differs from the policy's unconstrained one."""
    train_inexact: bool = False
    """Train turns that were sampled at temperature 0 or with parameters other than the temperature (top-p,
    top-k, min-p, penalties, a bias, min_tokens). Their recorded logprobs are not those of the sampled
    distribution."""
    train_side_calls: bool = True
    """Train the requests that an agent's harness makes for itself: for titles, topics, quotas and summaries
    (`generations/side_calls.py`). Sessions may choose otherwise."""
    router_replay: bool = False
    """Mixtures of experts: record which experts the engine chose for each token, for the trainer to replay
    them. Engines need `rollout_server.router_replay`."""
    engines: CommaSeparated = []
    """Bare SGLang servers to use beside registered rollout servers."""
    client_keys: CommaSeparated = []
    """API keys of clients, who open and reward sessions."""
    admin_keys: CommaSeparated = []
    """API keys of operators. Services without keys of their own call each other with the first one."""
    rollout_server_key: ServiceKey = None
    """The key of rollout servers: it lets them register, and the gateway calls them with it."""
    trainer_key: ServiceKey = None
    """The key of the trainer: it lets it publish and remove versions and adapters."""
    engine_key: ServiceKey = None
    """The key that engines ask for (`rollout_server.engine_key`); null: they ask for none."""
    keys_file: Path | None = None
    """A YAML file with more keys, each with a name, several secrets and limits of its own
    (`callers/api_keys.py`). SIGHUP reads it, `client_keys` and `admin_keys` again."""
    max_body_bytes: int = 32 * 2**20
    """Largest request body; a larger one gets a 413."""
    max_bodies_bytes: Annotated[int, BOUND] = Field(512 * 2**20, ge=1)
    """Bytes of bodies that the gateway reads, or turns into tokens, at once. Beyond it, calls get a 429. The
    last eighth is only for keys that hold little."""
    max_bodies_bytes_per_key: Annotated[int, BOUND] = Field(256 * 2**20, ge=1)
    """The same for one key, its sessions included."""
    max_background_answers: Annotated[int, BOUND] = Field(256, ge=1)
    """Answers that are made in the background at once (`background: true` in Responses). Beyond it, such
    calls get a 429."""
    max_background_answers_per_key: Annotated[int, BOUND] = Field(64, ge=1)
    """The same for the sessions of one client key."""
    connections: Annotated[ConnectionBounds, BOUND] = ConnectionBounds()
    limits: LimitSettings = LimitSettings()
    warnings: WarningSettings = WarningSettings()
    session_ttl_s: float = 3600.0
    """Default `ttl_s` of sessions. A session expires `ttl_s` seconds after its creation or its last call."""
    retention_s: float | None = Field(7 * 86400.0, gt=0)
    """How long a session is kept once it has its verdict. If Redis fills up, the oldest are removed earlier.
    null: sessions are never removed."""
    engine_timeout_s: float = 600.0
    """How long an engine that responds to probes may pause in the middle of an answer. One that does not
    respond is given up after 3 s if another engine can continue (`fleet/silence.py`)."""
    scheduler_silence_s: Annotated[float, FOR_TESTS] = Field(30.0, gt=0)
    """How long an engine's scheduler may neither send a token nor respond. Then its answers move to an engine
    whose scheduler responds. Set it to more than the longest forward pass takes."""
    concurrency: ConcurrencySettings = ConcurrencySettings()
    engine_wait_s: Annotated[float, FOR_TESTS] = 20.0
    """How long a call waits for an available engine before it gets a 503."""
    failover_patience_s: Annotated[float, FOR_TESTS] = 180.0
    """How long an unfinished answer waits for an engine that continues it, after its own engine failed."""
    join_identical: bool = False
    """Let identical concurrent calls share one answer, even if no call is marked as a retry."""
    retry_grace_s: Annotated[float, FOR_TESTS] = Field(1.0, ge=0, le=1.5)
    """How long an answer continues after its client disconnected. A retry within this time receives it."""
    heartbeat_s: Annotated[float, FOR_TESTS] = Field(15.0, gt=0)
    """Interval of keep-alive events in a stream without new tokens: proxies close silent connections."""
    push_timeout_s: float = Field(600.0, gt=0)
    """How long a server may take to prepare a policy, and again to load it. Then it is told to stop."""
    push_lease_s: Annotated[float, FOR_TESTS] = Field(10.0, ge=1)
    """How long after its death another gateway goes on with the push that a gateway was driving."""
    max_unavailable: float = Field(0.25, gt=0, le=1)
    """The share of the servers that may load a policy, and so pause, at once; at least one may."""
    fetch_fan_out: Annotated[int, TUNED] = Field(4, ge=1)
    """How many servers may fetch a version at once from the trainer, and from each server that has it."""
    max_adapters: int = Field(16, ge=1, le=1024)
    """How many adapters may be policies of their own (`POST /admin/adapters`)."""
    max_version_lag: int = Field(4, ge=0)
    """How many versions before the served one may still answer calls, where no push has replaced them."""
    auto_canary: bool = False
    """Let every version that the trainer publishes begin as a canary."""
    canary: CanarySettings = CanarySettings()
    tinker: TinkerSettings = TinkerSettings()
    images: ImageSettings = ImageSettings()
    page: PageSettings = PageSettings()
    wrong_keys: Annotated[WrongKeySettings, BOUND] = WrongKeySettings()
    leave_s: Annotated[float, FOR_TESTS] = Field(2.0, ge=0)
    """How long the gateway takes calls after SIGTERM while `/ready` fails, so that load balancers notice."""
    drain_timeout_s: float = 30.0
    """How long calls in flight may continue after `leave_s`. Then each client gets an error."""
    poll_every_s: Annotated[float, FOR_TESTS] = 0.5
    """Interval of the background tasks: they read the fleet's state, expire sessions, refresh limits, …"""

    @model_validator(mode="after")
    def _keys_have_one_role(self) -> "GatewaySettings":
        services = [each for each in (self.rollout_server_key, self.trainer_key) if each is not None]
        if len(set(services)) < len(services) or {*self.client_keys, *self.admin_keys} & set(services):
            raise ValueError(
                "gateway: rollout_server_key, trainer_key, client_keys and admin_keys must differ"
            )
        if services and not self.admin_keys and self.keys_file is None:
            raise ValueError("gateway: with keys of services, set admin_keys or a keys_file for operators")
        return self

    @model_validator(mode="after")
    def _trainable(self) -> "GatewaySettings":
        if not self.train_inexact and (found := inexact(self.sampling.model_dump())):
            message = (
                f"sampling: no turn sampled with {', '.join(found)} is trained, unless train_inexact is true"
            )
            raise ValueError(message)
        return self

    def share(self) -> "GatewaySettings":
        """The settings of one of the workers, whose bounds are shares of the whole gateway's, rounded up."""

        def part(bound: int) -> int:
            return -(-bound // self.workers)

        bounds, images = self.connections, {"cache_bytes": part(self.images.cache_bytes)}
        connections = {"in_all": part(bounds.in_all), "per_address": part(bounds.per_address)}
        return self.model_copy(
            update={
                "session_cache_bytes": part(self.session_cache_bytes),
                # A part of it is free for other keys (`edge/request.py`): one whole body fits into the rest.
                "max_bodies_bytes": max(part(self.max_bodies_bytes), -(-8 * self.max_body_bytes // 7)),
                "max_bodies_bytes_per_key": max(part(self.max_bodies_bytes_per_key), self.max_body_bytes),
                "max_background_answers": part(self.max_background_answers),
                "max_background_answers_per_key": part(self.max_background_answers_per_key),
                "connections": bounds.model_copy(update=connections),
                "images": self.images.model_copy(update=images),
            }
        )
