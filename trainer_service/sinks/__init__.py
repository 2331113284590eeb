"""Where the trainer's figures go beside Prometheus: JSON lines, TensorBoard, Weights & Biases."""
