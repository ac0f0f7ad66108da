"""What benchmark.py times, and how."""
