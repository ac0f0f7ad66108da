"""SBM: star with bilinear mapping; see ``host``."""
