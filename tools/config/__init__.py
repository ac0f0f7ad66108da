"""Read, check and compose what a run command says."""
