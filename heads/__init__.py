"""Heads turn a backbone into a model with ``loss(batch)`` and ``predict(batch)``."""
