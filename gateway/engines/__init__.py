"""The fleet of rollout servers: sampling with failover, the choice of a server, and the push of policies."""
