"""Any model of timm as a host.

Nothing here knows a model by its name: ``probing`` runs a model on the meta device and records the
calls of its modules, ``slots`` recognises feed-forward networks and token mixers among them, and
``layouts`` converts what they read into a map. ``listing`` prints which models take which mixers.
"""

from backbones.hosts.timm_model.host import TimmBackbone

__all__ = ["TimmBackbone"]
