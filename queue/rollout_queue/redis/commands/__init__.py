"""The command log on Redis: the gateway's end, and the trainer's."""
