"""Durable, signed webhooks."""
