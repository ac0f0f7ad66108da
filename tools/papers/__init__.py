"""Published figures: rows, experiments and counts of configs/published."""
