"""What all commands share: their words, their tables and their errors."""
