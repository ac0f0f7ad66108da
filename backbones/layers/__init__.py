"""Building blocks that hosts and mixers share."""
