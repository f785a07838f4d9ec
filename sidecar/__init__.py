"""The observer: attaches to training and inference processes and watches their allocation."""

__version__ = "0.1.0"
