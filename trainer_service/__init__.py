"""The trainer: it reads turns from Redis, trains with DeepSpeed, and publishes the weights."""
