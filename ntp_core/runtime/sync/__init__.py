"""Gradient sync over uneven replicas: by segments, or by resharding as in the paper."""
