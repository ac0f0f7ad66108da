"""timm's Mlp over tokens, with weights of the map's size."""

from timm.layers import Mlp

from tests.references.field import through

CASES = [{}, {"expansion": 2.0}]


def reference(mixer, x):
    tokens, hidden = x.shape[1] * x.shape[2], mixer.fc1.out_features
    tensors = {name: mixer.at_size(name, x.shape[1:3]) for name in mixer.grid_axes}
    layer = Mlp(tokens, hidden, tokens)
    y = through(layer, {"fc1.bias": mixer.fc1.bias, **tensors}, x.flatten(1, 2).transpose(1, 2))
    return y.transpose(1, 2).reshape(x.shape)


def macs(mixer, c, h, w):
    return 2 * h * w * c * mixer.fc1.out_features
