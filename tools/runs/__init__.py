"""What run.py does around a training, an evaluation or a prediction."""
