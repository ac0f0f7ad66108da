"""PosMLP's and gMLP's gating units as token mixers.

In reading order: ``relations`` (Eq. 9 to 15, the matrices over the tokens of a window),
``gated_mlp`` (the unit) and ``posgu`` (the registered variants).
"""
