"""Losses of words, GPT-1's second loss, and pairs in both orders, against plain forms."""

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone
from heads.language_model import LanguageModel
from heads.text import TextClassifier
from tests.errors import refuses
from tests.steps import assert_a_step_lowers_the_loss

WORDS = 30


def made(name, head, *options, **more):
    torch.manual_seed(0)
    return head(create_backbone(name, img_size=16, vocabulary=WORDS, drop=0.0), *options, **more)


def texts():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (2, 7), generator=generator)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False
    chosen = torch.zeros(2, 7, dtype=torch.bool)
    chosen[0, [1, 4]] = chosen[1, 2] = True
    masked = tokens.clone()
    masked[chosen] = 4
    return {
        "tokens": tokens, "segments": tokens * 0, "mask": mask, "masked": masked,
        "chosen": chosen, "labels": torch.tensor([1.0, 0.0]), "group": torch.zeros(2).long(),
    }  # fmt: skip


def test_masked_words():
    head, batch = made("bert_tiny", LanguageModel).eval(), texts()
    linear, _, norm = head.transform
    torch.nn.init.normal_(head.bias)
    x = head.backbone.encode(batch["masked"], batch["segments"], batch["mask"])
    losses = []
    for row, column in ((0, 1), (0, 4), (1, 2)):
        y = F.layer_norm(F.gelu(linear(x[row, column])), (64,), norm.weight, norm.bias, 1e-12)
        logits = head.backbone.words.weight @ y + head.bias
        losses.append(-logits.log_softmax(0)[batch["tokens"][row, column]])
    torch.testing.assert_close(head.loss(batch)["loss_words"], torch.stack(losses).mean())
    guesses, words, groups = head.answers(batch, head.predict(batch))
    assert words.tolist() == batch["tokens"][batch["chosen"]].tolist()
    assert guesses.shape == groups.shape == (3,)
    assert head(batch["tokens"]).shape == (2, 7, WORDS)


def test_the_head_of_words_of_transformers_is_loaded(tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, hidden_act="gelu",
    )  # fmt: skip
    theirs = transformers.BertForMaskedLM(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    file, batch = tmp_path / "pytorch_model.bin", texts()
    state = {key: value.clone() for key, value in theirs.state_dict().items()}
    torch.save(state, file)
    options = {"img_size": 16, "vocabulary": WORDS, "pretrained": file, "fast": False}
    head = LanguageModel(create_backbone("bert_tiny", **options)).eval()
    with torch.no_grad():
        given = (batch["masked"], batch["mask"].long(), batch["segments"])
        wanted = theirs(*given).logits[batch["chosen"]]
        torch.testing.assert_close(head.predict(batch), wanted, rtol=1e-4, atol=1e-4)
    del state["cls.predictions.bias"]
    state.pop("cls.predictions.decoder.bias", None)
    torch.save(state, file)
    head = LanguageModel(create_backbone("bert_tiny", **options))
    assert "the head of words in the pretrained file is incomplete" in caplog.text
    assert head.bias.abs().max() == 0


def plain_next_words(head, batch):
    """Losses of the next words of each text, one by one."""
    found = []
    for tokens, mask in zip(batch["tokens"], batch["mask"], strict=True):
        real = tokens[mask]
        x = head.backbone.encode(real[None])[0]
        logits = x @ head.backbone.words.weight.T
        found.append(-logits.log_softmax(1)[range(len(real) - 1), real[1:]])
    return found


def test_next_words():
    head, batch = made("gpt_tiny", LanguageModel).eval(), texts()
    wanted = torch.cat(plain_next_words(head, batch)).mean()
    torch.testing.assert_close(head.loss(batch)["loss_words"], wanted)
    assert not [name for name, _ in head.named_parameters() if not name.startswith("backbone.")]


def test_gpt_adds_half_of_the_loss_of_words():
    head, batch = made("gpt_tiny", TextClassifier, 2, words_weight=0.5).eval(), texts()
    found = head.loss(batch)
    wanted = torch.stack([losses.mean() for losses in plain_next_words(head, batch)]).mean()
    torch.testing.assert_close(found["loss_words"], 0.5 * wanted)
    refuses("bert_tiny sees later words", made, "bert_tiny", TextClassifier, 2, words_weight=0.5)


def test_both_orders_are_added():
    head, batch = made("gpt_tiny", TextClassifier, 2).eval(), texts()
    swapped = {name: batch[name].flip(0) for name in ("tokens", "segments", "mask")}
    both = batch | {f"{name}_swapped": value for name, value in swapped.items()}
    pooled = head.backbone.embed(batch["tokens"], None, batch["mask"])
    wanted = head.classifier(pooled + pooled.flip(0))
    torch.testing.assert_close(head.predict(both), wanted)


def test_data_of_the_other_kind_are_refused():
    refuses("pass protocol=mlm to pretrain on it", made, "bert_tiny", TextClassifier, 0)
    refuses("protocol=mlm pretrains on plain text", made, "bert_tiny", LanguageModel, 2)
    with pytest.raises(ValueError, match="deit_t cannot read text"):
        LanguageModel(create_backbone("deit_t", img_size=64))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_base", "bert_base_afbo", "bert_large", "gpt1", "gpt1_afbo"])
def test_full_hosts_train(name):
    head = TextClassifier(create_backbone(name, img_size=16), 2)
    batch = {key: value[:1] for key, value in texts().items()}
    assert_a_step_lowers_the_loss(head.eval(), batch, lr=1e-3)  # without dropout
