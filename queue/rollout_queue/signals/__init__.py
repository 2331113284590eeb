"""What operators read of a running service: its log, its access log, its traces."""
