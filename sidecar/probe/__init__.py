"""What lives in the watched process. Loads no exporter, no web and no HTTP module."""
