"""Fixtures of several test files."""

import pytest
import torch

from tests.runs import arguments, command


@pytest.fixture(scope="session")
def sample_cache(tmp_path_factory):
    """One folder for the sample data of all runs of a test session."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("sample_data")
        patch.setenv("MIXERLAB_CACHE", str(cache))
        yield cache


@pytest.fixture
def one_thread():
    """As many threads as the subprocesses of the tests have, for results equal to the bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def outputs(tmp_path_factory):
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="session")
def trained(outputs, sample_cache):
    """task -> how its run ended; each is trained once, by the real command."""
    runs = {}

    def train(task):
        if task not in runs:
            more = []
            if task == "transfer":
                train("classification")
                more = [f"backbone.pretrained={outputs}/classification/deit_t/latest"]
            runs[task] = command(arguments(task, outputs, *more, epochs=2))
        return runs[task]

    return train
