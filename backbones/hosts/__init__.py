"""One architecture with open slots per file; every file here registers itself."""
