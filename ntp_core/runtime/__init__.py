"""The only torch code of the engine."""
