"""Runs of ``trainer=cpu`` on the pretended device, as ``trainer=gpu`` has them on a GPU."""

from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.pretended.device import DEVICE, NAME


def use_device():
    """Make Lightning take the pretended device for the CPU."""
    build_strategy, build_precision = SingleDeviceStrategy.__init__, MixedPrecision.__init__

    def strategy(self, device="cpu", *args, **options):
        build_strategy(self, DEVICE, *args, **options)

    def precision(self, precision, device, *args, **options):
        build_precision(self, precision, NAME, *args, **options)

    SingleDeviceStrategy.__init__ = strategy
    MixedPrecision.__init__ = precision
    CPUAccelerator.setup_device = lambda self, device: None
