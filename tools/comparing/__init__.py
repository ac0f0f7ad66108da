"""Compare run folders with each other and with published rows."""
