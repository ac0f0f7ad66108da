"""Comparisons of mixers by a plan: its statistics, runs and tables."""
