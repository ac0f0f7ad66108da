"""Equal terms of runs: the host's weights, the batches and their order, and samples held out."""

import pytest
import torch

from tests.runs import TINY
from tools.config.config_checks import resolve_config
from tools.config.overrides import read_command
from tools.config.run_config import job_config
from tools.runs.components import build_components, check_config
from tools.runs.shared_start import start_as_host, unlike_parts

SMALL = ("task=classification", "trainer=cpu", "logger=csv", *TINY["classification"])


def built(folder, *words):
    command = read_command([*SMALL, *words])
    config = check_config(resolve_config(job_config(command.words, command.config)))
    return build_components(config, folder, resumed=False)


@pytest.mark.usefixtures("sample_cache")
@pytest.mark.parametrize("host", ["deit_t", pytest.param("poolformer_s12", marks=pytest.mark.slow)])
def test_rows_of_a_block_start_alike_and_see_the_same_batches(tmp_path, host):
    rows = {name: built(tmp_path, f"backbone={host}{name}", "start=host", "seed=3")
            for name in ("", "_glu", "_iffn")}  # fmt: skip
    batches, states = [], []
    for parts in rows.values():
        batches.append([batch["sample_id"] for batch in parts.datamodule.train_dataloader()])
        states.append(parts.task.model.state_dict())
    for other in batches[1:]:
        assert all(map(torch.equal, batches[0], other))
    plain = rows[""].task.model
    for name in ("_glu", "_iffn"):
        model = rows[name].task.model
        unlike = tuple(f"backbone.{part}" for part in unlike_parts(model.backbone, plain.backbone))
        state = model.state_dict()
        outside = [key for key in state if not key.startswith(unlike)]
        # Without a class token DeiT has one position less.
        shared = [key for key in outside if state[key].shape == states[0][key].shape]
        assert set(outside) - set(shared) <= {"backbone.pos_embed"}
        assert any(key.startswith("classifier") for key in shared)
        for key in shared:
            assert torch.equal(state[key], states[0][key]), key
        assert all("mlp" in part for part in unlike)


@pytest.mark.usefixtures("sample_cache")
def test_training_draws_the_same_random_numbers(tmp_path):
    states = []
    for backbone in ("deit_t", "deit_t_glu"):
        built(tmp_path, f"backbone={backbone}", "start=host", "seed=3")
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.usefixtures("sample_cache")
def test_usual_runs_start_by_themselves(tmp_path):
    parts = built(tmp_path, "backbone=deit_t_glu")
    command = read_command([*SMALL, "backbone=deit_t_glu"])
    config = resolve_config(job_config(command.words, command.config))
    assert start_as_host(config, parts.datamodule, parts.task) == []


@pytest.mark.usefixtures("sample_cache")
def test_held_out_samples_are_neither_trained_nor_tested(tmp_path):
    usual = built(tmp_path, "backbone=resnet18").datamodule
    divided = built(tmp_path, "backbone=resnet18", "held_out=0.25").datamodule
    names = {
        (kind, split): [dataset.describe(n) for n in range(len(dataset))]
        for kind, module in (("usual", usual), ("divided", divided))
        for split in ("train", "val")
        for dataset in [module.dataset(split)]
    }
    train, held = names["divided", "train"], names["divided", "val"]
    assert sorted(train + held) == sorted(names["usual", "train"])
    assert not set(held) & set(names["usual", "val"])
    labels = divided.dataset("val").dataset.labels
    assert sorted(labels) == list(range(10))  # one of four images per class
    first, second = (divided.dataset("val")[0, 0]["image"] for _ in range(2))
    assert torch.equal(first, second)  # prepared as in evaluation


@pytest.mark.usefixtures("sample_cache")
def test_series_are_evaluated_by_their_validation_part(tmp_path):
    words = ("task=forecasting", "backbone=ffnet_1d", "data.hours=600", "data.lookback=24",
             "data.horizon=12", "trainer=cpu", "logger=csv")  # fmt: skip
    command = read_command([*words, "held_out=0.2"])
    config = check_config(resolve_config(job_config(command.words, command.config)))
    module = build_components(config, tmp_path, resumed=False).datamodule
    assert module.dataset("test") is module.dataset("val")


@pytest.mark.usefixtures("sample_cache")
def test_layouts_that_cannot_be_divided_say_so(tmp_path):
    command = read_command(["task=super_resolution", "backbone=edsr_baseline", "held_out=0.2",
                            "trainer=cpu", "logger=csv"])  # fmt: skip
    config = check_config(resolve_config(job_config(command.words, command.config)))
    with pytest.raises(ValueError, match=r"held_out=0.2, but \w+ cannot divide its training"):
        build_components(config, tmp_path, resumed=False)
