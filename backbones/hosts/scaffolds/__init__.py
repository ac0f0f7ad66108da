"""Base classes and shared parts of hosts, without registered names."""
