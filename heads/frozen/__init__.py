"""Classifiers that are solved from a frozen backbone's features instead of being trained."""
