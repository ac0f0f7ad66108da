"""Check that a backbone serves the task of a head."""

from __future__ import annotations

from backbones import Backbone


def check_host(backbone: Backbone, kind: type[Backbone], act: str, example: str) -> None:
    """Check the class of a head's backbone.

    Args:
        backbone: The backbone.
        kind: Class of the hosts that serve the task.
        act: The task, as a verb.
        example: Name of such a host.

    Raises:
        ValueError: A backbone of another class.
    """
    if not isinstance(backbone, kind):
        name = backbone.name or type(backbone).__name__
        raise ValueError(f"{name} cannot {act}; pass a host such as {example}")
