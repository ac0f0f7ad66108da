"""Shared by all commands: arguments, tables, errors, processes and files."""
