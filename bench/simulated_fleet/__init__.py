"""A large fleet, simulated: its pushes and its calls, on the gateway's own code. Time passes at once."""
