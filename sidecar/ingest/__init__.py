"""Drains rings and builds per-rank and per-job state."""
