"""Fixtures of tests of runs."""

import pytest


@pytest.fixture(scope="session")
def trainer_options():
    """Return the options of ``trainer=cpu``, with a row of the log per step."""
    from tools.config.lazy_groups import register_groups
    from tools.config.run_config import compose_config

    register_groups()
    return dict(compose_config(["trainer=cpu"]).trainer) | {"log_every_n_steps": 1}


@pytest.fixture(scope="module")
def backbones_are_options():
    """Register every backbone as an option."""
    from tools.config.lazy_groups import register_groups

    register_groups()
