"""A reference of each of the field's mixers, computed with the mixer's own tensors.

A file is called as the mixer is registered and has:

    reference(mixer, x)   the output for a map (B, H, W, C), by timm's layer or by a second
                          implementation from the paper's equations
    macs(mixer, c, h, w)  multiply-adds of one map, worked out by hand
    joint(mixer, x, p)    both outputs with prefix tokens p, where map and prefix mix jointly
    DIM, CASES            channels (24 by default) and options of ``create_mixer`` ([{}])
"""

from torch.func import functional_call


def through(layer, tensors, *inputs, names=None):
    """Call another implementation with the mixer's tensors, so that gradients reach them.

    Args:
        layer: A module of torch, timm or a toolkit.
        tensors: A mixer, or tensors by name.
        inputs: Its inputs.
        names: Beginnings of the mixer's names -> those of the layer.
    """
    tensors = tensors if isinstance(tensors, dict) else tensors.state_dict(keep_vars=True)
    for ours, theirs in (names or {}).items():
        tensors = {
            theirs + name.removeprefix(ours) if name.startswith(ours) else name: tensor
            for name, tensor in tensors.items()
        }
    own = {name: like.shape for name, like in layer.state_dict().items()}
    assert own.keys() == tensors.keys(), own.keys() ^ tensors.keys()
    given = {name: tensor.reshape(own[name]) for name, tensor in tensors.items()}
    return functional_call(layer.double().eval(), given, inputs)


def as_nchw(x):
    """(B, H, W, C) -> (B, C, H, W)."""
    return x.permute(0, 3, 1, 2)


def as_nhwc(x):
    """(B, C, H, W) -> (B, H, W, C)."""
    return x.permute(0, 2, 3, 1)
