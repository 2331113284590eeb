"""One optimizer step: the pass before it, the step on all ranks, its metrics, and its failures."""
