"""Where in a network a parameter lies, and how fast it learns there."""
