"""What is served: policies, the push of one to every rollout server, canaries and adapters."""
