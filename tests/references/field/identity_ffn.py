"""The tokens themselves."""


def reference(mixer, x):
    return 1.0 * x


def macs(mixer, c, h, w):
    return 0
