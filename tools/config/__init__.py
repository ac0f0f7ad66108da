"""Read, check and compose the config of a run command."""
