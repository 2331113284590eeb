"""How a service opens its connections to Redis: one server, a master that Sentinel names, or a cluster."""
