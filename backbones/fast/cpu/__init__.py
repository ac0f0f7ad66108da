"""Forms that call compiled operators, one file per mixer or layer."""
