"""The plain reference of CycleMLP."""

from tests.references.cyclemlp import token_mixing


def reference(mixer, x):
    state = mixer.state_dict(keep_vars=True)
    return token_mixing(x, {f"m.{name}": tensor for name, tensor in state.items()}, "m")


def macs(mixer, c, h, w):
    return h * w * 4 * c * c + c * (c // 4) + (c // 4) * 3 * c
