"""Token mixers by linear layers over tokens, rows and columns."""
