"""The layers f1, f2 and g of timm's block of StarNet."""

from timm.models.starnet import Block

from tests.references.field import as_nchw, as_nhwc, pointwise, through

CASES = [{}, {"op": "sum", "norm": False, "hidden_ratio": 2}]


def reference(mixer, x):
    c, hidden = x.shape[-1], mixer.g.in_features
    block = Block(c, hidden // c)
    tensors = mixer.state_dict(keep_vars=True)

    def layer(name, x):
        """Call one of timm's layers with the mixer's tensors."""
        own = {f"conv.{key}": tensors[f"{name}.{key}"] for key in ("weight", "bias")}
        norm = {key.replace("norm.", "bn."): t for key, t in tensors.items() if "norm." in key}
        return through(getattr(block, name), own | (norm if name == "g" else {}), x)

    first, second = block.act(layer("f1", as_nchw(x))), layer("f2", as_nchw(x))
    if mixer.norm is None:
        return pointwise(mixer.g, as_nhwc(first + second))
    return as_nhwc(layer("g", first * second))


def macs(mixer, c, h, w):
    return h * w * 3 * c * mixer.g.in_features
