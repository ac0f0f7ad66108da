"""Reference of the Python interface, from signatures and docstrings."""

from __future__ import annotations

# Module -> documented names, in the order of the page.
PUBLIC = {
    "backbones": (
        "create_backbone", "create_mixer", "list_backbones", "list_mixers", "register_host",
        "register_mixer",
    ),
    "backbones.base": (
        "Backbone", "FeatureInfo", "Mixer", "PointwiseMixer", "HostConfig", "Slot", "fill",
        "hidden_width",
    ),
    "backbones.fast": ("fast", "plain", "switched_off"),
    "backbones.analysis.lipschitz": ("lipschitz_bound",),
    "backbones.analysis.entropy": ("feature_entropy",),
    "backbones.analysis.counting": ("count_macs", "count_parameters"),
    "heads.linear": ("LinearClassifier",),
    "tasks": ("load", "ClassificationTask", "DetectionTask", "SegmentationTask"),
    "tasks.engine.family": ("Family", "Metric", "Counted"),
    "datamodules.base": ("BaseDataModule",),
}  # fmt: skip
CLASSES = {
    "Backbone": ":members:\n",
    "Mixer": ":members:\n",
    "LinearClassifier": ":members: from_pretrained\n",
}
# Module -> file of docs/examples that uses it.
EXAMPLES = {
    "backbones": "backbones_and_mixers",
    "backbones.base": "global_filter",
    "heads.linear": "plain_pytorch",
    "tasks": "lightning_trainer",
}
INTRODUCTION = """# Python

Signatures with types and docstrings of the public names. Examples are files that the tests run;
[In Python](../howto/python.md) explains them.
"""


def pages() -> dict[str, str]:
    """Return the page."""
    import importlib

    parts = [INTRODUCTION]
    for module, names in PUBLIC.items():
        parts.append(f"## {module}")
        found = importlib.import_module(module)
        for name in names:
            kind = "class" if isinstance(getattr(found, name), type) else "function"
            options = CLASSES.get(name, "")
            parts.append(f"```{{eval-rst}}\n.. auto{kind}:: {module}.{name}\n   {options}```")
        if module in EXAMPLES:
            path = f"../examples/{EXAMPLES[module]}.py"
            parts.append(f"Example:\n\n```{{literalinclude}} {path}\n:language: python\n```")
    return {"python": "\n\n".join(parts) + "\n"}
