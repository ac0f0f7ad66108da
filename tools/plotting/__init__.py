"""Shared parts of plots: colour bars, and labels that do not overlap."""
