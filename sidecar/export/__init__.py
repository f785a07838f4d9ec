"""Prometheus exposition and OpenTelemetry spans."""
