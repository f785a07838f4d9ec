"""The contract between a watched process and the sidecar: records and rings."""
