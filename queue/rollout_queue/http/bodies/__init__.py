"""Bodies of requests: how large they may be, how they are decoded, and what of them is JSON."""
