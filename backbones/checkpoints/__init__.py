"""Files of weights: open them safely and load them into networks."""
