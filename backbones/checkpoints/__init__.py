"""Files of weights: opening them safely, and putting what they hold into a network."""
