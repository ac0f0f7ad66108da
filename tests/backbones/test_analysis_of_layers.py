"""Keys, channel mappings and similarities, against plain references and on every host and mixer."""

import pytest
import torch
from torch import nn

from backbones import Mixer, create_mixer, list_mixers
from backbones.analysis.capturing import value_layer
from backbones.analysis.keys import KeyRanking, activated_share
from backbones.analysis.mappings import channel_mappings, mixer_mappings
from backbones.analysis.similarity import (
    alignment,
    alignments,
    centred_gram,
    effective_rank,
    token_similarity,
)
from tests.errors import refuses
from tests.families import SMALLEST, rest_slow, short
from tests.tensors import build_mixer, tokens


def test_sparsity_and_keys_by_hand():
    values = torch.tensor([[-1.0, 0.0, 0.2], [0.5, 3.0, -2.0]])
    assert activated_share(values) == pytest.approx(3 / 6)
    assert activated_share(values, 0.4) == pytest.approx(2 / 6)
    # Class 0 fires key 2, class 3 key 1; class 1 has no image.
    ranking = KeyRanking.start(4, 5)
    maps = torch.zeros(3, 5, 2, 2)
    maps[0, 2], maps[1, 2], maps[2, 1] = 4.0, 2.0, 1.0
    maps[0, 4, 0, 0] = 4.0  # a mean of 1, and of 0.5 over the class
    ranking.add(maps[:2], torch.tensor([0, 0]))
    ranking.add(maps[2:], torch.tensor([3]))
    assert ranking.seen().tolist() == [0, 3]
    assert ranking.means()[0].tolist() == [0, 0, 3, 0, 0.5]
    assert ranking.top_keys().flatten().tolist() == [2, 1]
    assert ranking.top_keys(2)[0].tolist() == [2, 4]
    assert ranking.shares_in_top(1).tolist() == [0, 0.5, 0.5, 0, 0]
    assert ranking.shares_in_top(5).tolist() == [1] * 5


@pytest.mark.parametrize("name", list_mixers("channel"))
def test_mappings_of_every_channel_mixer_equal_its_computation(name):
    mixer = build_mixer(name, dim=24)
    declared = next((p.channel_mappings for p in mixer.modules() if declares(p)), ())
    try:
        found = mixer_mappings(mixer)
    except ValueError as error:
        assert "does not map channels by one matrix" in str(error)  # noqa: PT017
        assert not declared
        return
    x = tokens(1, 3, 24)
    parts = {key: getattr(mixer, key, None) for key in found.matrices}
    for key, matrix in found.matrices.items():
        assert matrix.shape[1] == 24
        if parts[key] is not None and not isinstance(parts[key], nn.Conv2d):
            given = parts[key](x) - parts[key](torch.zeros_like(x))
            torch.testing.assert_close(given, x @ matrix.T)
    two = len(declared) == 2 or len(found.matrices) == 2
    assert (found.interactions is not None) == (two and value_layer(mixer) is not None)
    if found.interactions is not None:
        assert found.interactions.shape == (24, 24)


def declares(part):
    return bool(getattr(part, "channel_mappings", ()))


@pytest.mark.parametrize(
    ("names", "has_matrices", "multiplies"),
    [
        (("cheby_kan", "nonlinear_sum"), False, False),
        (("ffn", "iffn", "convnext", "scheme_12"), True, False),
        (("glu", "swiglu", "convglu", "group_ffn"), True, True),
        (("afbo", "afbo_s", "scfbo_gc", "full"), True, True),
    ],
)
def test_which_of_the_papers_mixers_multiply_two_mappings(names, has_matrices, multiplies):
    for name in names:
        mixer = build_mixer(name, dim=24)
        if has_matrices:
            assert (mixer_mappings(mixer).interactions is not None) == multiplies
        else:
            refuses("does not map channels by one matrix", mixer_mappings, mixer)


def test_structure_and_interactions_of_mappings():
    """OCCM reads 3 of 4 groups, each run of GCCM one of 2; the strength is a plain sum."""
    mixer = build_mixer("afbo", dim=8, g1=2, g2=4)
    found = mixer_mappings(mixer)
    assert found.density() == {"cm_a": 0.75, "cm_b": 0.5}
    a, b, out = found.matrices["cm_a"], found.matrices["cm_b"], mixer.proj.weight
    expected = torch.zeros(8, 8, dtype=torch.float64)
    for hidden in range(a.shape[0]):
        for i in range(8):
            for j in range(8):
                expected[i, j] += out[:, hidden].norm() * a[hidden, i].abs() * b[hidden, j].abs()
    torch.testing.assert_close(found.interactions, expected)
    shared = mixer_mappings(create_mixer("afbo_s", 8))
    torch.testing.assert_close(shared.interactions, shared.interactions.T)
    blocks = mixer_mappings(create_mixer("group_ffn", 8, groups=2))
    assert set(blocks.density().values()) == {0.5}
    assert blocks.interactions[:4, 4:].abs().sum() == 0

    class Spatial(Mixer):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 1)

    refuses("does not map channels by one matrix", mixer_mappings, Spatial())


@pytest.mark.parametrize(
    "name", rest_slow([*SMALLEST, "ffnet_1_afbo"], ("deit_t", "edgevit_xxs", "ffnet_1_afbo"))
)
def test_mappings_of_every_host(name):
    backbone = short(name)
    if not backbone.channel_mixers():
        refuses("lacks a channel mixer", channel_mappings, backbone)
        return
    found = channel_mappings(backbone)
    assert list(found) == list(backbone.channel_mixers())
    assert (next(iter(found.values())).interactions is not None) == (
        name in ("visionllama_s", "ffnet_1_afbo")
    )


def plain_cka(x, y):
    """Kornblith et al., Eq. 3 and 4, by the matrices as they stand there."""
    n = len(x)
    h = torch.eye(n, dtype=torch.float64) - 1 / n

    def hsic(k, m):
        return torch.trace(k @ h @ m @ h) / (n - 1) ** 2

    k, m = x @ x.T, y @ y.T
    return (hsic(k, m) / (hsic(k, k) * hsic(m, m)).sqrt()).item()


def test_cka_by_its_definition():
    x, y = tokens(7, 4), tokens(7, 9, seed=2)
    found = alignment(centred_gram(x), centred_gram(y))
    assert found == pytest.approx(plain_cka(x, y))
    turned = torch.linalg.qr(tokens(4, 4, seed=3))[0]
    assert alignment(centred_gram(x), centred_gram(-3 * x @ turned + 5)) == pytest.approx(1)
    grams = {"a": centred_gram(x), "b": centred_gram(y)}
    matrix = alignments(grams, grams)
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(matrix.diag(), torch.ones(2, dtype=torch.float64))
    refuses("at least 3", alignments, grams, {"c": centred_gram(x[:5])})


def test_similarity_and_rank_of_known_tokens():
    maps = tokens(2, 5, 2, 3)
    for found, one in zip(token_similarity(maps), maps.flatten(2), strict=True):
        pairs = [
            torch.cosine_similarity(one[:, i], one[:, j], dim=0)
            for i in range(6) for j in range(6) if i != j
        ]  # fmt: skip
        assert found.item() == pytest.approx(sum(p.item() for p in pairs) / 30)
    same = tokens(1, 5, 1, 1).expand(1, 5, 3, 3)
    assert token_similarity(same).item() == pytest.approx(1)
    assert token_similarity(maps[..., :1, :1]).isnan().all()
    orthogonal = torch.eye(6, dtype=torch.float64).view(1, 6, 2, 3)
    assert effective_rank(orthogonal).item() == pytest.approx(6)
    line = tokens(1, 6, 1, 1) * torch.arange(1.0, 7.0).view(1, 1, 2, 3)
    assert effective_rank(line).item() == pytest.approx(1)
