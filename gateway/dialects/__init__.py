"""The public wire shapes. Each dialect reads its requests into the same `Call`s, and writes the answers."""
