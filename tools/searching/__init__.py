"""The spaces that search.py searches."""
