"""Token mixers by convolutions and by modulation with a convolved context."""
