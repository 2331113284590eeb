"""A service as several processes, its workers, on one port."""
