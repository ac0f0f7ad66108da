"""Search spaces of search.py."""
