"""OpenTelemetry traces. Off by default; then neither OpenTelemetry's spans nor its exporter are imported."""
