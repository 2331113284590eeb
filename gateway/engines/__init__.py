"""The fleet of engines: sampling with failover, the choice of a server, and the policies that they serve."""
