"""Token mixers by convolutions and by modulation with a convolved context."""

from backbones.importing import import_files

import_files(__name__)
