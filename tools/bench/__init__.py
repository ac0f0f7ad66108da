"""Measurements of benchmark.py: what is timed, and how."""
