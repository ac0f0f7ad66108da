"""Imports of every run; the process from which runs are forked imports it first."""

# ruff: noqa: E402, F401

from tools.cli.processes import prepare_process

prepare_process()  # before torch is imported

import lightning.pytorch
import timm
import torchvision

import tools.config.overrides
import tools.runs.components
