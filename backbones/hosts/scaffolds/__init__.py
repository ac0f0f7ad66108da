"""Base classes of hosts; these files register nothing."""
