"""Token mixers by softmax attention over tokens, within windows or to a reduced map."""
