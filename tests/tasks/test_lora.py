"""Runs with low-rank adapters: what is trained, resumed, loaded and exported."""

import pytest
import torch

import tasks
from backbones import create_backbone
from tests.runs import arguments, completed, same, summary, weights
from tools import export

pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sample_cache")]
LORA = "backbone.lora={rank:4,targets:[qkv,mlp]}"


def test_a_run_trains_adapters_resumes_and_is_exported_merged(tmp_path, capsys, one_thread):
    start = create_backbone("deit_t", img_size=64).state_dict()
    torch.save(start, tmp_path / "start.pth")
    more = [LORA, "schedule.name=constant", f"backbone.pretrained={tmp_path / 'start.pth'}"]
    whole = completed(arguments("classification", tmp_path / "whole", *more, epochs=2), capsys)
    folder = whole.folder()
    facts = summary(folder)
    assert 0 < facts["trained_parameters"] < 0.05 * facts["parameters"]
    assert " M trained" in whole.out
    found = weights(folder)
    for name, value in start.items():
        layer, _, last = name.rpartition(".")
        plain = found.get(f"model.backbone.{name}")
        kept = found.get(f"model.backbone.{layer}.base_layer.{last}") if plain is None else plain
        assert torch.equal(kept, value), name

    first = completed(arguments("classification", tmp_path / "part", *more, epochs=1), capsys)
    again = [*more, "resume=true", f"ckpt={first.folder()}"]
    completed(arguments("classification", tmp_path / "part", *again, epochs=2), capsys)
    assert same(weights(first.folder()), found)

    task = tasks.load(folder)
    export.main(["to=timm", f"ckpt={folder}", f"out={tmp_path / 'timm'}"])
    (file,) = (*(tmp_path / "timm").glob("*.pth"), *(tmp_path / "timm").glob("*.safetensors"))
    merged = create_backbone("deit_t", img_size=64, pretrained=file).eval()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(
        merged.embed(images), task.model.backbone.embed(images), atol=1e-4, rtol=1e-4
    )
