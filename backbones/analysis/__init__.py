"""Measurements of networks: counts, attention, receptive fields, Lipschitz bounds."""
