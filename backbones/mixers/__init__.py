"""One paper's mixer per file; every file here registers itself."""
