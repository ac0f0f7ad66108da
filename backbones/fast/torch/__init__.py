"""Forms in torch's own operations, one file per mixer."""
