"""Check the installation with the standard library only."""
