"""Token mixers by softmax attention over tokens, within windows or to a reduced map."""

from backbones.importing import import_files

import_files(__name__)
