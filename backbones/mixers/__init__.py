"""One paper's mixer per file; every file here registers itself."""

from backbones.importing import import_files

import_files(__name__)

COMPLETE = True  # the mixers of other packages come after these
