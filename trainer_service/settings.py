"""The trainer's settings, and their defaults."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rollout_queue.contract.published_policy import ObjectPrefix
from rollout_queue.redis.settings import WriterRedisSettings
from rollout_queue.settings import (
    FOR_TESTS,
    TUNED,
    CommaSeparated,
    HttpSettings,
    ObjectStoreSettings,
    ServiceKey,
    SettingsPart,
)
from rollout_queue.tracing import OtelSettings
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.model.settings import ModelSettings

RecordedTokens = Literal["none", "advantages", "all"]


class GuardSettings(SettingsPart):
    """Section `trainer.guards`: the limits beyond which a guard raises an alarm, and what happens then. A
    guard whose limit is null is off."""

    max_grad_norm_ratio: float | None = Field(100.0, gt=1)
    """The largest `grad_norm` (before clipping), as a multiple of its median over the last 100 steps. A
    median below 1 counts as 1."""
    max_abs_logp: float | None = Field(0.2, gt=0)
    """The largest `mismatch/abs_logp_current`, in nats per token: the mean |difference| between trainer and
    engine, on tokens that the trainer's own version sampled. A step without such tokens is not judged."""
    max_kl: float | None = Field(0.2, gt=0)
    """The largest |`mismatch/kl_current`|, in nats per token, on the same tokens."""
    reward_drop: float | None = Field(0.5, gt=0)
    """How far the mean reward of the last `reward_groups` groups of a task may fall below the best earlier
    mean of as many groups, as a share of that mean's absolute value. A fall that noise explains does not
    count."""
    reward_groups: Annotated[int, TUNED] = Field(32, ge=2)
    max_recoveries: Annotated[int, TUNED] = Field(3, ge=0)
    """How many times guards set the training back to the best checkpoint, and let it go on. After that, an
    alarm holds it there."""
    recovery_lr_factor: float = Field(0.5, gt=0, le=1)
    """Each time that the training is set back, the learning rate is multiplied by this."""
    roll_back: bool = True
    """While the training is held, have the fleet serve the version whose sessions had the best rewards."""


class TeacherSettings(SettingsPart):
    """Section `trainer.teacher`: the address of the teacher, and how many rows it scores at once."""

    url: str
    """The address of an SGLang server: http://host:port."""
    api_key: str | None = None
    """Its key."""
    timeout_s: float = Field(120.0, gt=0)
    """How long it may take for one row."""
    concurrency: int = Field(8, ge=1)
    """How many rows it scores at once."""


class WandbSettings(SettingsPart):
    """Section `trainer.wandb`. The API key comes from `wandb login`, or from WANDB_API_KEY."""

    project: str
    """The project of the run."""
    name: str | None = None
    """The run's name. It stays the same when the trainer is restarted."""
    entity: str | None = None
    """The user or team that owns the project; null: the default of the key."""
    group: str | None = None
    """What joins the runs of restarted trainers. Default: `name`."""
    id: str | None = None
    """The run's id. With an id, a restarted trainer continues the run; without one, it begins a new run."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """Offline runs are written to `dir`, for `wandb sync`."""
    dir: Path = Path("run")
    """Where the library writes its files."""


class CollectiveSettings(SettingsPart):
    """Section `trainer.collective`: how tensors are sent to engines, with `transport: collective`."""

    address: str = "127.0.0.1"
    """The address of this machine that engines connect to. They need no key there, so another one than
    loopback must be in a closed network."""
    senders: Annotated[int, TUNED] = Field(4, ge=1, le=64)
    """How many engines get the tensors at once; more wait."""
    timeout_s: Annotated[float, FOR_TESTS] = Field(60.0, gt=0)
    """How long an engine may take to join, and to take each bucket of tensors. The next snapshot waits while
    engines receive the former one, and at most so long for a bucket."""


class TrainerSettings(HttpSettings, WriterRedisSettings, ModelSettings):
    """Section `trainer` of weir.yaml."""

    section: ClassVar[str] = "trainer"

    source: Literal["turns", "commands"] = "turns"
    """What the trainer learns from. turns: what agents did, with this section's algorithm. commands: what
    users' own loops ask for; several models are trained over one base model."""
    base_models: CommaSeparated = []
    """With `commands`, the names of the base model in commands; empty: `model_path`, or its last part."""
    otel: OtelSettings | None = None
    """Traces; null: none."""
    port: int = 8200
    public_url: str | None = None
    """Where gateways reach the trainer; null means http://host:port. If `host` is 0.0.0.0, the URL has
    the address from which this machine reaches Redis."""
    gateway_url: str = "http://127.0.0.1:8000"
    client_keys: CommaSeparated = []
    """The clients' keys. The trainer answers them with 403, and unknown keys with 401."""
    admin_keys: CommaSeparated = []
    trainer_key: ServiceKey = None
    """What the trainer presents to the gateway, and the gateway to it with an operator's request; null means
    the first admin key."""
    rollout_server_key: ServiceKey = None
    """The key of rollout servers: they read weights with it, and the trainer presents it to them. Null means
    the first admin key."""
    model_name: str = "policy"
    checkpoint_dir: Path = Path("run/checkpoints")
    policies_dir: Path = Path("run/policies")
    metrics_path: Path | None = Path("run/metrics.jsonl")
    """One JSON line per step. Evaluations have their lines in a second file, which ends in `.eval.jsonl`."""
    tensorboard_dir: Path | None = Field(
        default_factory=lambda given: given["metrics_path"] and given["metrics_path"].parent / "tensorboard"
    )
    """Event files for TensorBoard; default: `tensorboard` beside `metrics_path`."""
    wandb: WandbSettings | None = None
    """A run at Weights & Biases; needs the extra `wandb`."""
    publish_url: str | None = None
    """Where rollout servers fetch versions: http://host:port/weights, or s3://bucket/path, to which the
    trainer copies them. By default they read `policies_dir`."""
    object_store: ObjectStoreSettings = ObjectStoreSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    teacher: TeacherSettings | None = None
    """The teacher that scores each token, for losses that distil (preset `opd`)."""
    guards: GuardSettings = GuardSettings()

    checkpoint_every_minutes: float = Field(10.0, gt=0)
    """The longest time between two checkpoints. A small model has more: one is made whenever the last one
    took less than 5 % of the time since."""
    checkpoint_every_steps: int | None = Field(None, ge=1)
    """Make a checkpoint after every so many steps instead."""
    publish_every_steps: int = Field(1, ge=1)
    """A version is published after every so many steps."""
    keep_checkpoints: int = Field(2, ge=2)
    """How many checkpoints are kept, the newest ones."""
    keep_policies: int = Field(4, ge=2)
    """How many published versions are kept, the newest ones."""
    record_tokens: RecordedTokens = "all"
    """What is stored of each trained token, for `GET /sessions/{id}?tokens=true`. advantages: its advantage.
    all: also the ratio of its probability under the trainer's weights to that under the engine's."""
    paused_traffic: Literal["record", "discard", "refuse"] = "record"
    """What happens to sessions for training while the training is paused or held. record: they wait for the
    next step. discard: they end without training. refuse: the gateway opens no new ones."""
    transport: Literal["files", "delta", "adapter", "collective"] = "files"
    """What is published of a version. files: the whole weights. delta: also the changes against the former
    version; a server that has that one fetches only these (`publish_url`). adapter: only the LoRA
    adapter (`lora`). If no rollout server takes it (`rollout_server.lora`), later versions are whole.
    collective: the files, and engines receive the tensors in a process group before (`collective`)."""
    collective: CollectiveSettings = CollectiveSettings()
    anchor_every: Annotated[int, TUNED] = Field(10, ge=2)
    """With `delta`, every so many versions one is published without changes."""
    shared_with: CommaSeparated = []
    """With `memory: shared`, the rollout servers whose engines use the trainer's device: http://host:port."""
    initial_version: int = Field(0, ge=0)
    """The version number of the weights in `model_path`."""
    push_timeout_s: Annotated[float, FOR_TESTS] = Field(600.0, gt=0)
    """How long the gateway may take to push a version to every server."""
    lease_s: Annotated[float, FOR_TESTS] = Field(30.0, ge=1)
    """A lease that is not renewed expires after this time. After a crash, the next trainer waits this long,
    unless it runs on the same machine and sees that the process has ended."""
    retry_s: Annotated[float, FOR_TESTS] = Field(1.0, gt=0)
    """The first pause before a failed call is repeated: to Redis, the gateway, the teacher or the disk. Later
    pauses double up to 30 s."""

    @property
    def operators_keys(self) -> list[str]:
        """The keys that open everything: those of operators, and the gateway's, which asks for them."""
        return [*self.admin_keys, *([] if self.trainer_key is None else [self.trainer_key])]

    @property
    def key_for_gateway(self) -> str | None:
        return self.trainer_key or next(iter(self.admin_keys), None)

    @property
    def key_for_servers(self) -> str | None:
        return self.rollout_server_key or next(iter(self.admin_keys), None)

    @property
    def learns_entropy(self) -> bool:
        return self.algorithm.entropy_bonus > 0

    @property
    def learns_routing(self) -> bool:
        return self.algorithm.router_aux_loss > 0

    @property
    def moves_reference(self) -> bool:
        return self.algorithm.kl.reference_every_steps is not None

    @model_validator(mode="after")
    def _moving_references_are_copies(self) -> "TrainerSettings":
        if self.moves_reference and self.lora is not None:
            raise ValueError(
                "trainer.algorithm.kl.reference_every_steps: with trainer.lora, the reference is the model "
                "without its adapters, and cannot move; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _commands_are_possible(self) -> "TrainerSettings":
        if self.source == "turns":
            return self
        if self.zero_stage == 3:
            raise ValueError(
                "trainer.zero_stage: source commands needs stage 0, 1 or 2; its models share a base model, "
                "which stage 3 would partition"
            )
        if self.memory == "shared":
            raise ValueError("trainer.memory: source commands needs exclusive")
        if (self.publish_url or "").startswith("http"):
            raise ValueError(
                "trainer.publish_url: with source commands, engines find adapters on a shared disk (leave it "
                "out) or at s3://"
            )
        return self

    @model_validator(mode="after")
    def _losses_that_distil_have_a_teacher(self) -> "TrainerSettings":
        if self.algorithm.loss.needs_teacher != (self.teacher is not None):
            raise ValueError(
                f"trainer.teacher: loss {self.algorithm.loss.name} "
                + ("needs a teacher; set its url" if self.teacher is None else "uses no teacher")
            )
        return self

    @model_validator(mode="after")
    def _advantages_with_values_have_a_critic(self) -> "TrainerSettings":
        if self.algorithm.needs_critic != (self.critic is not None):
            raise ValueError(
                f"trainer.critic: advantage {self.algorithm.advantage.name} "
                + ("needs a critic; set it, {} is enough" if self.critic is None else "uses no critic")
            )
        return self

    @model_validator(mode="after")
    def _published_adapters_are_trained(self) -> "TrainerSettings":
        if self.transport == "adapter" and self.lora is None:
            raise ValueError("trainer.transport: adapter needs trainer.lora; {} is enough")
        return self

    @model_validator(mode="after")
    def _shared_memory_has_engines(self) -> "TrainerSettings":
        if (self.memory == "shared") != bool(self.shared_with):
            raise ValueError(
                "trainer.shared_with: give the URL of each rollout server on the trainer's device"
                if self.memory == "shared"
                else "trainer.shared_with: needs trainer.memory shared"
            )
        return self

    @model_validator(mode="after")
    def _publish_url_is_plain(self) -> "TrainerSettings":
        url = self.publish_url or "http://"
        if url.startswith("s3://"):
            try:
                ObjectPrefix.parse(url)
            except ValueError as error:
                raise ValueError(f"trainer.publish_url: {error}") from error
        elif not url.startswith(("http://", "https://")):
            raise ValueError(
                "trainer.publish_url: give an http:// or s3:// address, or leave it out to use file://"
            )
        return self
