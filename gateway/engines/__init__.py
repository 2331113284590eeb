"""The fleet of engines: who samples, who takes over, which policy they serve."""
