"""Writes metrics to JSON lines, TensorBoard and Weights & Biases."""
