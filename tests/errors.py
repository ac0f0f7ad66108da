"""Checks of error messages."""

import pytest


def refuses(message, call, *args, **options):
    """Check that a call raises a ValueError with this message; return its whole text."""
    with pytest.raises(ValueError, match=message) as caught:
        call(*args, **options)
    return str(caught.value)
