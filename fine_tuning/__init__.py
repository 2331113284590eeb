"""Fine-tuning jobs in OpenAI's form, on the runner of environments and the graders of the reward service."""
