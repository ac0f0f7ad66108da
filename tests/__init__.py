"""Tests by room; what several of them share is in the files beside the rooms."""
