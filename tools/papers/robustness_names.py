"""Robustness datasets and the names of their metrics in papers."""

ROBUSTNESS = {
    "imagenet_a": "in_a",
    "imagenet_r": "in_r",
    "imagenet_sketch": "in_sketch",
    "imagenet_v2": "in_v2",
}
