"""One analysis a file; the package above says what such a file holds."""
