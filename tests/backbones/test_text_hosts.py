"""BERT and GPT-1 against plain references and transformers; mixers on padded sequences."""

import pytest
import torch

from backbones import create_backbone, list_mixers
from backbones.analysis.counting import count_parameters
from heads.text import TextClassifier
from tasks.engine.loops.compilation import compile_blocks
from tests.errors import refuses
from tests.families import rest_slow
from tests.references import text as plain
from tools.papers.published import load_rows

WORDS = 50


def randomised(module):
    generator = torch.Generator().manual_seed(1)
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            value.copy_(0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
            if "norm" in name.lower() and name.endswith("weight"):
                value.add_(1)
    return module


def perturbed(module):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.05 * torch.randn(value.shape, generator=generator).to(value))
    return module


def host(name, **options):
    made = create_backbone(name, img_size=16, vocabulary=WORDS, fast=False, **options)
    return randomised(made.double().eval())


def texts():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, WORDS, (2, 9), generator=generator)
    segments = torch.tensor([[0] * 5 + [1] * 4] * 2)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    return tokens, segments, mask


BERT = {
    "blocks.": "encoder.layer.", ".attn.proj.": ".attention.output.dense.",
    ".attn.": ".attention.self.", ".norm1.": ".attention.output.LayerNorm.",
    ".norm2.": ".output.LayerNorm.", ".mlp.fc1.": ".intermediate.dense.",
    ".mlp.fc2.": ".output.dense.", "words.": "embeddings.word_embeddings.",
    "positions.": "embeddings.position_embeddings.",
    "segments.": "embeddings.token_type_embeddings.", "pooler.": "pooler.dense.",
}  # fmt: skip
GPT = {
    "blocks.": "h.", ".attn.qkv.": ".attn.c_attn.", ".attn.proj.": ".attn.c_proj.",
    ".norm": ".ln_", ".mlp.fc1.": ".mlp.c_fc.", ".mlp.fc2.": ".mlp.c_proj.",
    "words.": "tokens_embed.", "positions.": "positions_embed.",
}  # fmt: skip


def names_of_transformers(state, names):
    """Tensors by the names of transformers."""
    found = {}
    for key, value in state.items():
        name = key if key[:5] != "norm." else f"embeddings.LayerNorm.{key[5:]}"
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        found[name] = value
    return found


def theirs_bert(state):
    return names_of_transformers(state, BERT)


def theirs_gpt(state):
    joined = {}
    for key, value in state.items():
        if ".attn.query." in key:
            parts = [state[key.replace("query", part)] for part in ("query", "key", "value")]
            joined[key.replace("query", "qkv")] = torch.cat(parts)
        elif ".attn.key." not in key and ".attn.value." not in key:
            joined[key] = value
    transposed = {
        key: value.T if value.ndim == 2 and key.startswith("blocks.") else value
        for key, value in joined.items()
    }
    return names_of_transformers(transposed, GPT)


def test_bert_equals_a_plain_one_with_gradients():
    made = host("bert_tiny")
    tokens, segments, mask = texts()
    own = {k: v.detach().clone().requires_grad_() for k, v in made.state_dict().items()}
    wanted, pooled = plain.bert(tokens, segments, mask, theirs_bert(own), 2, 4)
    found = made.encode(tokens, segments, mask)
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(made.embed(tokens, segments, mask), pooled, rtol=1e-8, atol=1e-8)
    by = torch.randn_like(pooled)
    (made.embed(tokens, segments, mask) * by).sum().backward()
    (pooled * by).sum().backward()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name].grad, rtol=1e-6, atol=1e-8, msg=name)


def test_gpt_equals_a_plain_one_with_gradients():
    made = host("gpt_tiny")
    tokens, _, mask = texts()
    own = {k: v.detach().clone().requires_grad_() for k, v in made.state_dict().items()}
    wanted = plain.gpt(tokens, theirs_gpt(own), 2, 4)
    torch.testing.assert_close(made.encode(tokens, None, mask)[mask], wanted[mask])
    last = torch.stack([wanted[0, 8], wanted[1, 5]])
    found = made.embed(tokens, None, mask)
    torch.testing.assert_close(found, last)
    by = torch.randn_like(last)
    (found * by).sum().backward()
    (last * by).sum().backward()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad, own[name].grad, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("name", ["bert_tiny", "gpt_tiny"])
def test_files_of_transformers_load(name):
    made = host(name)
    state = made.state_dict()
    given = theirs_bert(state) if name == "bert_tiny" else theirs_gpt(state)
    prefix, head = ("bert.", "cls.predictions.bias") if name == "bert_tiny" else (
        "transformer.", "lm_head.weight")  # fmt: skip
    converted = made.convert_state_dict(
        {f"{prefix}{key}": value for key, value in given.items()} | {head: torch.zeros(2)}
    )
    assert converted.keys() == state.keys()
    assert all(torch.equal(converted[key], value) for key, value in state.items())


@pytest.mark.parametrize("name", ["bert_tiny", "gpt_tiny"])
def test_a_file_of_transformers_loads_whole_by_its_path(name, tmp_path, caplog):
    state = {key: value.float() for key, value in host(name).state_dict().items()}
    given = theirs_bert(state) if name == "bert_tiny" else theirs_gpt(state)
    prefix = "bert." if name == "bert_tiny" else "transformer."
    file = tmp_path / "pytorch_model.bin"
    torch.save({f"{prefix}{key}": value for key, value in given.items()}, file)
    options = {"img_size": 16, "pretrained": file, "fast": False}
    with caplog.at_level("INFO"):
        made = create_backbone(name, vocabulary=WORDS, **options)
    assert "0 resized, 0 left at their initialisation, 0 in the file not used" in caplog.text
    assert all(torch.equal(made.state_dict()[key], value) for key, value in state.items())
    with pytest.raises(ValueError, match=r"has 50 words, .* has 93; pass data\.tokenizer="):
        create_backbone(name, vocabulary=93, **options)


def test_gpts_files_lack_the_tokens_of_fine_tuning():
    made = host("gpt_tiny")
    own = made.state_dict()["words.weight"].clone()
    given = theirs_gpt(made.state_dict())
    given["tokens_embed.weight"] = given["tokens_embed.weight"][:-3] + 1
    found = made.convert_state_dict(given)["words.weight"]
    assert torch.equal(found[:-3], own[:-3] + 1)
    assert torch.equal(found[-3:], own[-3:])


def test_bert_equals_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256,
    )  # fmt: skip
    theirs = randomised(transformers.BertModel(config).double().eval())
    made = host("bert_tiny")
    made.load_state_dict(made.convert_state_dict(dict(theirs.state_dict())))
    tokens, segments, mask = texts()
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, token_type_ids=segments, attention_mask=mask.long())
        found = made.encode(tokens, segments, mask)
        torch.testing.assert_close(found[mask], wanted.last_hidden_state[mask])
        torch.testing.assert_close(made.embed(tokens, segments, mask), wanted.pooler_output)


def test_gpt_equals_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.OpenAIGPTConfig(vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4)
    theirs = randomised(transformers.OpenAIGPTModel(config).double().eval())
    made = host("gpt_tiny")
    made.load_state_dict(made.convert_state_dict(dict(theirs.state_dict())))
    tokens, _, mask = texts()
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        torch.testing.assert_close(made.encode(tokens, None, mask)[mask], wanted[mask])


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize(("name", "causal"), [("bert_tiny_afbo", False), ("gpt_tiny_afbo", True)])
def test_a_mixer_along_the_sequence_skips_padding_and_the_future(name, causal, fast):
    made = create_backbone(name, img_size=16, vocabulary=WORDS, fast=fast)
    made = randomised(made.double().eval())
    tokens, _, mask = texts()
    other = tokens.clone()
    other[1, 6:] = (other[1, 6:] + 1) % WORDS
    one, two = (made.encode(given, None, mask)[mask] for given in (tokens, other))
    torch.testing.assert_close(one, two)
    alone = made.encode(tokens[1:, :6])[0]
    torch.testing.assert_close(made.encode(tokens, None, mask)[1, :6], alone)
    later = tokens.clone()
    later[0, 5:] = (later[0, 5:] + 1) % WORDS
    changed = made.encode(later)[0, :5] - made.encode(tokens)[0, :5]
    assert (changed.abs().max() < 1e-9) == causal
    # The kernels do reach over neighbours: an earlier word changes a later place.
    made.blocks[0].attn.proj.weight.data.zero_()
    made.blocks[1].attn.proj.weight.data.zero_()
    earlier = tokens.clone()
    earlier[0, 3] = (earlier[0, 3] + 1) % WORDS
    assert (made.encode(earlier)[0, 4] - made.encode(tokens)[0, 4]).abs().max() > 1e-6


@pytest.mark.parametrize("form", rest_slow(["recomputed", "compiled"], ["recomputed"]))
@pytest.mark.parametrize("mixers", [{"mixer": "afbo"}, {"token_mixer": "attention"}],
                         ids=["kernels", "by_length"])  # fmt: skip
def test_recomputed_and_compiled_blocks_skip_padding(mixers, form):
    found = []
    for changed in (False, True):
        torch.manual_seed(0)
        options = {"grad_checkpointing": True} if changed and form == "recomputed" else {}
        made = create_backbone(
            "bert_tiny", img_size=16, vocabulary=WORDS, drop=0.0, **mixers, **options
        )
        if changed and form == "compiled":
            torch._dynamo.reset()
            compile_blocks(made, backend="aot_eager")
        made.embed(*texts()).square().sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in made.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_counts():
    counts = {}
    for name in ("bert_base", "bert_large", "gpt1"):
        with torch.device("meta"):
            counts[name] = count_parameters(create_backbone(name))
            with_afbo = count_parameters(create_backbone(f"{name}_afbo"))
        counts[f"{name}_afbo"] = with_afbo - counts[name]
    assert counts == {
        "bert_base": 109_482_240, "bert_base_afbo": 331_776,
        "bert_large": 335_141_888, "bert_large_afbo": 884_736,
        "gpt1": 116_534_784, "gpt1_afbo": 331_776,
    }  # fmt: skip


MIXERS = [("token_mixer", name) for name in list_mixers("token")] + [
    ("mixer", name) for name in list_mixers("channel")
]  # fmt: skip


@pytest.mark.parametrize(("option", "name"), MIXERS, ids=lambda one: one)
def test_more_padding_changes_no_embedding(option, name):
    made = create_backbone("bert_tiny", img_size=16, vocabulary=WORDS, **{option: name})
    made = perturbed(made.eval())
    with torch.no_grad():
        tokens, _, mask = texts()
        mask[0, 7:] = False
        wanted = made.embed(tokens, None, mask)
        more = torch.cat([tokens, torch.randint(0, WORDS, (2, 6))], 1)
        padded = made.embed(more, None, torch.cat([mask, torch.zeros(2, 6).bool()], 1))
        torch.testing.assert_close(padded, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made.embed(tokens[1:, :6])[0], wanted[1], rtol=1e-4, atol=1e-4)


def test_attention_as_a_mixer_equals_that_of_bert():
    own = host("bert_tiny")
    made = host("bert_tiny", token_mixer={"name": "attention", "num_heads": 4})
    made.load_state_dict(own.state_dict(), strict=False)
    for new, old in zip(made.blocks, own.blocks, strict=True):
        new.attn.query.proj.load_state_dict(old.attn.query.state_dict())
        new.attn.leave.proj.load_state_dict(old.attn.proj.state_dict())
        for name in ("weight", "bias"):
            parts = [getattr(part, name) for part in (old.attn.key, old.attn.value)]
            getattr(new.attn.memory.proj, name).data = torch.cat(parts).detach()
    given = texts()
    torch.testing.assert_close(made.encode(*given)[given[2]], own.encode(*given)[given[2]])


def test_mixers_that_read_later_tokens_are_refused():
    with pytest.raises(
        ValueError, match="reads later tokens, so it does not fit this causal"
    ) as no:
        create_backbone("gpt_tiny", img_size=16, vocabulary=WORDS, token_mixer="xca")
    fitting = str(no.value).partition("pass one of ")[2].split(", ")
    assert {"sep_conv", "gated_conv", "identity"} <= set(fitting)
    assert "retention" not in fitting
    for name in fitting:
        made = create_backbone("gpt_tiny", img_size=16, vocabulary=WORDS, token_mixer=name)
        made = perturbed(made.double().eval())
        tokens, later = texts()[0], texts()[0]
        later[:, 5:] = (later[:, 5:] + 1) % WORDS
        changed = made.encode(later)[:, :5] - made.encode(tokens)[:, :5]
        assert changed.abs().max() < 1e-6, name
    refuses(r"has 512 positions, fewer than 600 tokens", create_backbone, "bert_tiny", img_size=600)


@pytest.mark.parametrize("row", load_rows("afbo", "glue"), ids=lambda row: row.name)
def test_published_rows(row):
    classes = 3 if row.train.data == "mnli" else 2
    with torch.device("meta"):
        model = TextClassifier(create_backbone(row.backbone, **row.options), classes)
    assert count_parameters(model) == row.params
