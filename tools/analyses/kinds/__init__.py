"""One analysis per file; the package above describes such a file."""
