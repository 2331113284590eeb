"""The routes of operators: the deployment, its API keys, the trainer, and the log of admin actions."""
