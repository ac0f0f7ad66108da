"""Forms in torch's own operations, one file per mixer."""

from backbones.importing import import_files

import_files(__name__)
