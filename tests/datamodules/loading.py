"""Datamodules after ``setup``, errors that it raises, and samples of batches."""

import pytest


def ready(kind, root, **options):
    """Return a datamodule after ``setup``."""
    data = kind(root, **options)
    data.setup()
    return data


def rejected(kind, root, message, error=ValueError, **options):
    """Check that ``setup`` raises an error; return its message."""
    with pytest.raises(error, match=message) as caught:
        ready(kind, root, **options)
    return str(caught.value)


def dense_samples(loader):
    """Return the samples of all batches of a dense dataset."""
    return [sample for batch in loader for sample in batch["data_samples"]]
