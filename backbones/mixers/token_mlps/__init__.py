"""Token mixers by linear layers over tokens, rows and columns."""

from backbones.importing import import_files

import_files(__name__)
