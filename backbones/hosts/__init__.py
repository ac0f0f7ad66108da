"""Hosts: one architecture with slots for mixers per file; every file registers itself."""
