"""Datamodules after ``setup``, errors that it raises, and samples of batches."""

from functools import partial

import pytest


def ready(make, *given, **options):
    """Return a datamodule after ``setup``."""
    data = make(*given, **options)
    data.setup()
    return data


def rejected(make, *given, error=ValueError, **options):
    """Check that ``setup`` raises the error whose message is last; return the whole message."""
    *given, message = given
    with pytest.raises(error, match=message) as caught:
        ready(make, *given, **options)
    return str(caught.value)


def bound(make, **defaults):
    """Return the constructor with defaults, and ``ready`` and ``rejected`` by it."""
    make = partial(make, **defaults)
    missing = partial(rejected, make, error=FileNotFoundError)
    return make, partial(ready, make), partial(rejected, make), missing


def dense_samples(loader):
    """Return the samples of all batches of a dense dataset."""
    return [sample for batch in loader for sample in batch["data_samples"]]


def check_both(data, message):
    """Check that validation and the check of all files raise an error with the same message."""
    for read in (lambda: list(data.val_dataloader()), data.check_files):
        with pytest.raises(ValueError, match=message):
            read()
