"""Runs the trainer until SIGTERM: python -m trainer_service [--config weir.yaml].

On several GPUs: deepspeed --num_gpus N --module trainer_service [--config weir.yaml]
On several hosts: also by torchrun or srun; see docs/ranks.md
"""

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import httpx
import torch
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollout_queue.contract.errors import LeaseLost, StorageUnavailable
from rollout_queue.http.callers import Keyring, bearer, refuse_open_binding
from rollout_queue.http.http_server import LOOPBACK_ADDRESS, WILDCARDS, HttpThread, address_towards, http_url
from rollout_queue.redis.command_log import CommandReader
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.redis_client import open_redis
from rollout_queue.redis.schema_version import SchemaTooNew, claim_schema
from rollout_queue.redis.settings import RedisSettings, read_address
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.service_log import AccessLog
from rollout_queue.starting import begin, begin_tracing, command_line, one_sentence
from trainer_service.app import create_app
from trainer_service.commands.serving import train_by_commands
from trainer_service.curves import Curves, limits_of
from trainer_service.heartbeat import Heartbeat, Stopped, keep_lease, watch_disk
from trainer_service.intake import Intake
from trainer_service.model.checkpoint_layout import LayoutRefused, NotConverted
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.model.trained_models import Models
from trainer_service.publishing.gateway_client import GatewayClient
from trainer_service.publishing.places import place_of
from trainer_service.publishing.publisher import Publisher
from trainer_service.publishing.tensor_sender import TensorSender
from trainer_service.settings import TrainerSettings
from trainer_service.shared_state import SharedState
from trainer_service.sinks import chosen_sinks
from trainer_service.sizing import find_gpu, resolved
from trainer_service.step.device_memory import DeviceMemory, RolloutMemory
from trainer_service.step.rank_communication import joined, own_rank, own_ranks
from trainer_service.step.ranks import DistributedPolicy, PolicyRank, follow
from trainer_service.step.step_attempts import OutOfMemory, is_out_of_memory
from trainer_service.step.teacher import TeacherClient
from trainer_service.storage.checkpoint import CheckpointBroken, Checkpoints
from trainer_service.storage.durable_files import lock_directory
from trainer_service.storage.policy_store import PolicyStore
from trainer_service.storage.run_state import OutOfMemoryMark
from trainer_service.train import Trainer
from trainer_service.trainer_metrics import TrainerMetrics

logger = logging.getLogger("trainer_service")

REDIS_TIMEOUT_S = 30.0
"""How long a call to Redis may take. No read waits so long for entries, and no transaction takes so long."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("trainer_service", __doc__)
    parser.add_argument("--local_rank", help="added by the DeepSpeed launcher; LOCAL_RANK is read instead")
    given = parser.parse_args(arguments)
    os.environ |= joined(os.environ, torch.cuda.device_count())
    settings = begin(TrainerSettings, given.config, f"rank {own_rank()}" if own_rank() else "")
    settings = resolved(settings, find_gpu(settings), own_ranks())
    if own_rank() > 0:
        by_commands = settings.source == "commands"
        part = Models(settings) if by_commands else PolicyRank(DeepSpeedPolicy(settings))
        # Only now, so that a signal still ends a rank that is loading the model.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 gets the signal too, and ends this rank
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with marked_if_out_of_memory(settings.checkpoint_dir):
            follow(part)
        return
    begin_tracing(settings.otel, "weir-trainer", sample_ratio=1)  # steps are few
    keyring = Keyring(settings.client_keys, settings.operators_keys, settings.rollout_server_key)
    refuse_open_binding(settings.host, keyring)
    shared_state = SharedState()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        shared_state.stop()

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, stop)
    where = f"trainer.checkpoint_dir: {settings.checkpoint_dir} has a checkpoint that cannot be loaded"
    try:
        with (
            one_sentence("", LeaseLost, SchemaTooNew),
            one_sentence(where, CheckpointBroken, LayoutRefused, NotConverted),
            marked_if_out_of_memory(settings.checkpoint_dir),
        ):
            serve(settings, keyring, shared_state)
    except Stopped:
        logger.info("stopped before the model was loaded")


def serve(settings: TrainerSettings, keyring: Keyring, shared_state: SharedState) -> None:
    """Build the trainer's parts, and train until told to stop."""
    registry = CollectorRegistry()
    # Ranks on other hosts may have another working directory.
    checkpoints = Checkpoints(settings.checkpoint_dir.absolute(), settings.keep_checkpoints)
    store, sender = _policy_store(settings), _tensor_sender(settings)
    parts_of_app = (shared_state, checkpoints.ledger, store, keyring, registry, sender, _curves(settings))
    app = create_app(*parts_of_app, settings.public_url)
    logger.info("algorithm %s", settings.algorithm.model_dump_json())
    redis = connect(settings)
    # The lease has its own connection: when a call on it times out, the lease is still valid for a retry.
    lease_redis = connect(settings, settings.lease_s / 3)
    lease = Lease(lease_redis, settings.lease_s)
    client = httpx.Client(base_url=settings.gateway_url, headers=bearer(settings.key_for_gateway))
    with (
        lock_directory(settings.checkpoint_dir),
        HttpThread(AccessLog(app) if settings.access_log else app, settings.host, settings.port),
        closing(sender) if sender is not None else nullcontext(),
        redis,
        lease_redis,
        client,
    ):
        logger.info("listens on %s:%d", settings.host, settings.port)
        watch_disk(settings.checkpoint_dir, shared_state)
        with keep_lease(lease, shared_state, settings.retry_s) as held:
            if not held:
                return
            metrics = TrainerMetrics(registry, chosen_sinks(settings))
            stream = _open_stream(redis, lease, shared_state, settings)
            if stream is None:
                return
            shared_state.snapshot = replace(
                shared_state.snapshot,
                url=own_url(settings),
                source=settings.source,
                max_row_tokens=settings.algorithm.max_row_tokens,
            )
            heartbeat = Heartbeat(stream, shared_state, settings.retry_s)
            gateway = GatewayClient(client, settings.push_timeout_s)
            parts = (stream, gateway, store, checkpoints, metrics, shared_state, heartbeat)
            if settings.source == "commands":
                train_by_commands(settings, CommandReader(redis, lease.token), *parts)
            else:
                train_by_turns(settings, sender, *parts)
            metrics.close()
    logger.info("ended")


def train_by_turns(
    settings: TrainerSettings,
    sender: TensorSender | None,
    stream: StreamReader,
    gateway: GatewayClient,
    store: PolicyStore,
    checkpoints: Checkpoints,
    metrics: TrainerMetrics,
    shared_state: SharedState,
    heartbeat: Heartbeat,
) -> None:
    """Train on the turns of agents until told to stop."""
    with device_memory(settings, heartbeat) as memory:
        policy = DistributedPolicy(DeepSpeedPolicy(settings), _shared_directory(settings))
        policy.require_shared(settings.checkpoint_dir)
        width = policy.replayed_width
        images = None if settings.teacher else policy.image_rule  # the teacher gets ids alone
        place = place_of(settings, store, lambda: shared_state.stopping)
        teacher = _teacher(settings, policy.vocab_size)
        Trainer(
            settings=settings,
            policy=policy,
            intake=Intake(stream, settings.algorithm, policy.vocab_size, heartbeat, metrics, width, images),
            checkpoints=checkpoints,
            publisher=Publisher(store, gateway, stream, place, heartbeat, metrics, sender=sender),
            metrics=metrics,
            shared_state=shared_state,
            heartbeat=heartbeat,
            teacher=teacher,
            memory=memory,
        ).run()
    if teacher is not None:
        teacher.close()
    policy.close()  # not after an exception: ranks that wait in a collective receive no command


@contextmanager
def marked_if_out_of_memory(checkpoint_dir: Path) -> Iterator[None]:
    """If the block ends because an allocation failed, leave a mark for the next process."""
    try:
        yield
    except (RuntimeError, OutOfMemory) as error:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            OutOfMemoryMark(checkpoint_dir).set()
        raise


@contextmanager
def device_memory(settings: TrainerSettings, heartbeat: Heartbeat) -> Iterator[DeviceMemory]:
    """The memory of the device, taken from the engines so that the model can be loaded. May raise Stopped."""
    headers = bearer(settings.key_for_servers)
    with (
        httpx.Client(headers=headers, trust_env=False) as client,  # the engines are on this machine
        DeviceMemory([RolloutMemory(client, url) for url in settings.shared_with], heartbeat) as memory,
    ):
        memory.take()
        yield memory


def _shared_directory(settings: TrainerSettings) -> Path | None:
    """Where every rank writes its share of a version; None if rank 0 keeps all of it, to send it."""
    return None if settings.transport == "collective" else settings.policies_dir


def _policy_store(settings: TrainerSettings) -> PolicyStore:
    return PolicyStore(
        settings.policies_dir,
        settings.model_path,
        settings.keep_policies,
        settings.anchor_every if settings.transport == "delta" else None,
        collective=settings.transport == "collective",
    )


def _curves(settings: TrainerSettings) -> Curves:
    return Curves(settings.metrics_path, limits_of(settings.guards))


def _tensor_sender(settings: TrainerSettings) -> TensorSender | None:
    if settings.transport != "collective":
        return None
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return TensorSender(settings.collective, device)


def _teacher(settings: TrainerSettings, vocab_size: int) -> TeacherClient | None:
    top_k = settings.algorithm.loss.teacher_top_k
    return TeacherClient(settings.teacher, vocab_size, top_k) if settings.teacher else None


def own_url(settings: TrainerSettings) -> str:
    """The URL at which gateways reach this trainer. A trainer that listens on all addresses gives the address
    from which it reaches Redis, because the gateways use the same Redis."""
    if settings.public_url:
        return settings.public_url.rstrip("/")
    wildcard = LOOPBACK_ADDRESS
    if settings.host in WILDCARDS:
        with suppress(OSError):
            wildcard = _address_towards_redis(settings)
    return http_url(settings.host, settings.port, wildcard)


def _address_towards_redis(settings: RedisSettings) -> str:
    """Raises OSError."""
    nodes = read_address(settings.redis_url).nodes
    return address_towards(http_url(*nodes[0])) if nodes else LOOPBACK_ADDRESS


def connect(settings: RedisSettings, timeout_s: float = REDIS_TIMEOUT_S) -> Redis:
    """A client whose calls time out if Redis does not answer. The trainer then reports this, and tries again.

    The client repeats no call by itself, even if the URL asks for that. When the answer of a read is lost,
    Redis counts the entries in it as delivered, and a repeated read would skip them.
    """
    once = Retry(NoBackoff(), 0)
    return open_redis(settings, timeout_s, retry=once)


def _open_stream(
    redis: Redis, lease: Lease, shared_state: SharedState, settings: TrainerSettings
) -> StreamReader | None:
    """Wait until Redis answers, and return the reader; None if the trainer is told to stop first. Raises
    SchemaTooNew if newer releases have used this Redis."""
    while not shared_state.stopping:
        try:
            claim_schema(redis)
            return StreamReader(redis, lease.token, lease.renew, settings.replication)
        except StorageUnavailable as error:
            logger.warning("%s; trying again in %g s", error, settings.retry_s)
            shared_state.sleep(settings.retry_s)
    return None


if __name__ == "__main__":
    main()
