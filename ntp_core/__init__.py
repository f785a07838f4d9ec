"""The engine: uneven plans, layers, gradient sync and live allocation changes."""

__version__ = "0.1.0"
