"""Forms that call compiled operators, one file per mixer or layer."""

from backbones.rooms import import_files

import_files(__name__)
