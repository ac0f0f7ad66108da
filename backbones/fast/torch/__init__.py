"""Forms in torch's own operations, one file per mixer."""

from backbones.rooms import import_files

import_files(__name__)
