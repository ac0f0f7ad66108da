"""Token mixers that work on the Fourier transform of a map."""
