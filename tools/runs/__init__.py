"""The parts of run.py around a training, an evaluation or a prediction."""
