"""Token mixers that work on the Fourier transform of a map."""

from backbones.importing import import_files

import_files(__name__)
