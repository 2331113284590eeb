"""Where metrics go beside Prometheus: JSON lines, TensorBoard, Weights & Biases."""
