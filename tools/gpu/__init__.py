"""Checks of a GPU: numbers, fast forms, tasks and speed, each with a verdict; make gpu."""
