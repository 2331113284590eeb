"""Messages to tokens and tokens to messages, for every chat template."""
