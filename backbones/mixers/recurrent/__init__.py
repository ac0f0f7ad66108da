"""Token mixers that pass a state from token to token, computed in chunks or in closed form."""
