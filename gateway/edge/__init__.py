"""The edge is the agents' side of HTTP: it reads every model call and writes its reply."""
