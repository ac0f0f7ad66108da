"""PosMLP: windowed gating units with relative positional encoding; see ``host``."""
