"""Runs of ``trainer=cpu`` on the pretended device, as ``trainer=gpu`` has them on a GPU."""

import importlib.util
import typing

from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from tasks.engine.checkpoints import exact_resume
from tests.pretended.device import DEVICE, NAME, Pretended

# A wrapper's version cannot be reset in inference mode.
WORDS = ("trainer=cpu", "+trainer.inference_mode=false", "data.num_workers=0", "logger=csv")


def use_device(patch):
    """Make Lightning take the pretended device for the CPU; ``patch`` is pytest's MonkeyPatch."""
    build_strategy, build_precision = SingleDeviceStrategy.__init__, MixedPrecision.__init__

    def strategy(self, device="cpu", *args, **options):
        build_strategy(self, DEVICE, *args, **options)

    def precision(self, precision, device, *args, **options):
        build_precision(self, precision, NAME, *args, **options)

    patch.setattr(SingleDeviceStrategy, "__init__", strategy)
    patch.setattr(MixedPrecision, "__init__", precision)
    patch.setattr(CPUAccelerator, "setup_device", lambda self, device: None)
    # Files hold the device's tensors as plain ones.
    patch.setattr(exact_resume, "PLAIN", (*exact_resume.PLAIN, Pretended))
    if importlib.util.find_spec("mmengine"):  # names the types of the devices that it knows
        from mmengine.structures import instance_data

        types = typing.Union[(*typing.get_args(instance_data.IndexType), Pretended)]
        patch.setattr(instance_data, "IndexType", types)
