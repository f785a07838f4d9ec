"""From findings to incidents."""
