"""Run folders and published rows side by side."""
