"""Forms that call compiled operators, one file per mixer or layer."""

from backbones.importing import import_files

import_files(__name__)
