"""Robustness sets and the metrics that papers report on them."""

ROBUSTNESS = {
    "imagenet_a": "in_a",
    "imagenet_r": "in_r",
    "imagenet_sketch": "in_sketch",
    "imagenet_v2": "in_v2",
}
