"""torch.compile for a run: the blocks of its backbone, each for the map sizes that it meets first.

Blocks are compiled one by one, and equal ones share their code. Compiling the whole network takes
longer and gains little more, and heads of the MM toolkits cannot be traced.

Every size has a graph of its own (``dynamic=False``). With sizes as symbols a Swin-T is traced for
a minute, and again wherever a size decides whether a window is padded; for one size 4 s do.
A data set of pictures of many sizes would compile for ever: from ``MAX_SHAPES`` on, a new size
runs as it does without torch.compile, and a line says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from backbones import Backbone
from backbones.layers.recomputation import Recomputed

log_info = rank_zero_only(logging.getLogger(__name__).info)

MAX_SHAPES = 8  # of one block, in training and in evaluation each
UNLIMITED = 2**16


class FirstShapes:
    """Calls a compiled block on the first few shapes, and the block itself on further ones.

    Args:
        block: A module that ``nn.Module.compile`` has compiled.
        tell: Called wherever a shape is one too many.
    """

    def __init__(self, block: nn.Module, tell: Callable[[], None]) -> None:
        self.block: Any = block
        self.compiled: Any = self.block._compiled_call_impl
        self.tell = tell
        self.shapes: dict[Hashable, set[Hashable]] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the compiled block, or the block itself for a new shape after the limit."""
        mode = self.block.training, torch.is_grad_enabled()
        history = self.shapes.setdefault(mode, set())
        values = (*args, *options.values())
        shapes = tuple(value.shape if isinstance(value, Tensor) else value for value in values)
        if shapes not in history and len(history) >= MAX_SHAPES:
            self.tell()
            return self.block._call_impl(*args, **options)
        history.add(shapes)
        return self.compiled(*args, **options)


def compile_blocks(model: nn.Module, **options: Any) -> int:
    """Compile the blocks of all backbones in a model, in place.

    State-dict keys, copies and pickles are those of the model as it was.

    Args:
        model: Model of a task.
        **options: For ``torch.compile``, such as ``fullgraph`` and ``backend``.

    Returns:
        How many blocks there are.

    Raises:
        ValueError: Blocks compute themselves again in the backward pass, which torch cannot trace.
    """
    # All blocks of a class share one code object, of which torch would leave all but 8 versions
    # uncompiled; the limit is that of FirstShapes.
    config: Any = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = UNLIMITED
    blocks = [
        backbone.get_submodule(name)
        for backbone in model.modules()
        if isinstance(backbone, Backbone)
        for name in backbone.block_names()
    ]
    if any(isinstance(block, Recomputed) for block in blocks):
        raise ValueError(
            "trainer.compile=true cannot trace blocks that backbone.grad_checkpointing=true "
            "computes again; pass one of the two"
        )
    tell = _Once(
        f"trainer.compile: the blocks are compiled for {MAX_SHAPES} sizes of maps; further sizes "
        "run uncompiled. Images of one size gain most"
    )
    for block in blocks:
        block.compile(dynamic=False, **options)
        # torch itself drops this attribute from copies and pickles.
        block._compiled_call_impl = FirstShapes(block, tell)
    log_info(
        f"trainer.compile: {len(blocks)} blocks are compiled at the first step of each size of "
        "maps, which takes minutes for a large network"
    )
    return len(blocks)


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile works, by a sum.

    Raises:
        ValueError: It fails; the message says why.
    """
    # Of CUDA on a machine without; not what was asked.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        requirement = "a C++ compiler (apt-get install g++)" if device.type == "cpu" else "triton"
        raise ValueError(
            f"trainer.compile=true, but torch.compile does not work here: {lines[0]}; it needs "
            f"{requirement}; pass trainer.compile=false to run without"
        ) from error


class _Once:
    """Log a text at the first call."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self) -> None:
        if self.text:
            log_info(self.text)
        self.text = ""
