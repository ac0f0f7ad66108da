"""Exports of networks: shared parts, and one module per format or toolkit."""
