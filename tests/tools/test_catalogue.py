"""The catalogue equals the registry, and notices changes at once."""

import json

import pytest
from omegaconf import OmegaConf

from backbones import backbone_schema, list_backbones, list_hosts, list_mixers, mixer_options
from backbones.registry import find_mixer, look_up, register_mixer, unfit_pairs
from tools.cli import catalogue

UNKNOWN = ["swin_t_afb", "nothing_like_it", "deit_t_sbm", "swin_t_afbo_sbm", "resnet18_sbm"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXERLAB_CACHE", str(tmp_path / "cache"))
    return catalogue.cache_file()


@pytest.fixture
def read(cache):
    """Read the catalogue as another process does."""
    catalogue.load_catalogue()
    return catalogue.Catalogue(**json.loads(cache.read_text())["catalogue"])


def test_the_catalogue_equals_the_registry(read):
    assert read.list_backbones() == list_backbones()
    assert read.list_backbones("swin_?_afbo*") == list_backbones("swin_?_afbo*")
    assert sorted(read.hosts) == sorted(list_hosts())
    assert read.unfit == unfit_pairs()
    assert [*read.list_mixers("channel"), *read.list_mixers("token")] == [
        *list_mixers("channel"), *list_mixers("token"),
    ]  # fmt: skip
    for name in list_mixers():
        assert read.mixer(name)["options"] == plain(mixer_options(name))
        assert read.mixer(name)["source"] == find_mixer(name).source
    for name in [*list_backbones(), "swin_t_ffn"]:
        assert read.schema(name) == plain(backbone_schema(name)), name
        assert list(read.schema(name)) == list(backbone_schema(name)), name
        assert read.host_of(name) == look_up(name)[0].name, name
    with pytest.raises(ValueError, match="did you mean afbo"):
        read.mixer("afbbo")


def plain(options):
    return OmegaConf.to_container(OmegaConf.create(options))


def test_unknown_names_have_the_registrys_message(read):
    for name in [*UNKNOWN, *unfit_pairs()]:
        with pytest.raises(ValueError, match="there is no") as ours:
            read.schema(name)
        with pytest.raises(ValueError, match="there is no") as of_registry:
            look_up(name)
        assert str(ours.value) == str(of_registry.value)


def test_registrations_are_included_and_the_cache_is_optional(registering, tmp_path, monkeypatch):
    assert "swin_t_unheard_of" not in catalogue.catalogue().backbones
    register_mixer("unheard_of", kind="channel", source="A test.")(find_mixer("ffn").build)
    assert catalogue.catalogue().schema("swin_t_unheard_of")["mixer"]["hidden_ratio"] is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIXERLAB_CACHE", str(tmp_path / "file"))
    assert catalogue.load_catalogue().list_backbones() == list_backbones()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"fingerprint": 1}', '{"catalogue": {}}'])
def test_a_damaged_cache_is_rebuilt(cache, content):
    catalogue.load_catalogue()
    whole = cache.read_text()
    cache.write_text(content)
    catalogue.load_catalogue()
    assert cache.read_text() == whole
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]
