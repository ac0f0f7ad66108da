"""Controls: mixers against which others show what they add."""

from backbones.importing import import_files

import_files(__name__)
