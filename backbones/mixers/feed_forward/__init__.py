"""Channel mixers: feed-forward networks with gates, convolutions and structured matrices."""

from backbones.importing import import_files

import_files(__name__)
