"""The kinds of connection over which a writer sends its commands."""

from collections.abc import Mapping

from rollout_queue.redis.connection.pipelined import PipelinedConnection
from rollout_queue.redis.connection.pooled import PooledConnection
from rollout_queue.redis.connection.writer_connection import ConnectionFactory

CONNECTIONS: Mapping[str, ConnectionFactory] = {
    "pipelined": PipelinedConnection,
    "pooled": PooledConnection,
}
"""By their names in the gateway's setting `redis_connection`."""
