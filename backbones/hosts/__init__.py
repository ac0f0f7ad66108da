"""Hosts: one architecture with slots for mixers per file; every file registers itself."""

from backbones.importing import import_files

import_files(__name__)
