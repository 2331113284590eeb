"""What the gateway measures: counters that cost little where calls pass, and their form for Prometheus."""
