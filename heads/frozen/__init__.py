"""Classifiers solved from a frozen backbone's features, without gradient training."""
