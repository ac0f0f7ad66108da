"""Fixtures for tests of several tools."""

import pytest


@pytest.fixture(scope="session")
def reported(tmp_path_factory, sample_cache):
    """Folder of a finished run with its report."""
    from tests.runs import arguments, run_shared

    output = tmp_path_factory.mktemp("reported")
    ended = run_shared(arguments("classification", output, "report=true", backbone="deit_t"))
    assert ended.status == 0, ended.err
    return ended.folder()
