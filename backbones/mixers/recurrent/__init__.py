"""Token mixers that pass a state from token to token, computed in chunks or in closed form."""

from backbones.importing import import_files

import_files(__name__)
