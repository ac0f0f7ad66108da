"""The plain reference of Hire-MLP."""

from tests.references.hiremlp import token_mixing

CASES = [{}, {"block": 1}, {"region": 3, "shift": 4}, {"region": 1, "shift": 0}]


def reference(mixer, x):
    region, shift = mixer.layers.region, mixer.layers.shift
    state = mixer.layers.state_dict(keep_vars=True)
    state = {f"m.{name}": tensor for name, tensor in state.items()}
    return token_mixing(x, state, "m", region, shift)


def macs(mixer, c, h, w):
    p = mixer.layers.region
    down, across = -(-h // p) * p * w, -(-w // p) * p * h
    return (down + across) * c * c + h * w * 2 * c * c + c * (c // 4) + (c // 4) * 3 * c
