"""Controls: mixers against which others show what they add."""
