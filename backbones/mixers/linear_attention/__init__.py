"""Token mixers by attention without a softmax over pairs of tokens: kernels, agents, decays."""

from backbones.importing import import_files

import_files(__name__)
