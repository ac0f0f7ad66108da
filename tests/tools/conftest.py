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


@pytest.fixture(scope="session")
def smallest_run(tmp_path_factory, sample_cache):
    """A function of a family that returns the folder of its smallest run, made once."""
    from tests.runs import SMALLEST, run_shared

    output, folders = tmp_path_factory.mktemp("smallest"), {}

    def run(family):
        if family not in folders:
            typed = [f"task={family}", "trainer=cpu", *SMALLEST[family], "schedule.warmup=0"]
            ended = run_shared([*typed, "trainer.max_steps=2", f"output_dir={output}"])
            assert ended.status == 0, ended.err
            folders[family] = ended.folder()
        return folders[family]

    return run
