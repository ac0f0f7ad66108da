"""BERT and GPT-1: encoders of text with norms after the sums, and slots for mixers.

    x <- norm(x + attn(x));  x <- norm(x + FFN(x))

Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", NAACL 2019, https://arxiv.org/abs/1810.04805; Radford et al., "Improving Language
Understanding by Generative Pre-Training", 2018 (GPT-1). Checkpoints may have the names of
transformers (BertModel, OpenAIGPTModel, and models with heads).

Axes: B sequences, L tokens, C channels.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from backbones.base import Backbone, FeatureInfo
from backbones.hosts.scaffolds.hierarchical import drop_path_rates
from backbones.hosts.scaffolds.text import Kind, fit_to_texts, mix_by_length, real_tokens
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.mixer import Mixer, PointwiseMixer
from backbones.mixers.ffn import FFN
from backbones.parameters.layer_ids import LayerNames
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot, factory_at, fill

logger = logging.getLogger(__name__)

MODALITY = "text"
LENGTH = 128  # tokens by default
RATIO = 4.0
INIT = 0.02
EMBEDDINGS = ("words.", "positions.", "segments.", "norm.")
BERT_EPS, GPT_EPS = 1e-12, 1e-5
BERT_WORDS, GPT_WORDS = 30_522, 40_478
# What every such host passes to register_host.
TEXT_HOST: dict[str, Any] = {"modality": MODALITY, "patch_size": 1, "img_size": LENGTH}
# Names in transformers by ours; of BERT, then of GPT.
BERT_NAMES = {
    r"embeddings\.word_embeddings\.": "words.",
    r"embeddings\.position_embeddings\.": "positions.",
    r"embeddings\.token_type_embeddings\.": "segments.",
    r"embeddings\.LayerNorm\.": "norm.",
    r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.": r"blocks.\1.attn.\2.",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense\.": r"blocks.\1.attn.proj.",
    r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.": r"blocks.\1.norm1.",
    r"encoder\.layer\.(\d+)\.intermediate\.dense\.": r"blocks.\1.mlp.fc1.",
    r"encoder\.layer\.(\d+)\.output\.dense\.": r"blocks.\1.mlp.fc2.",
    r"encoder\.layer\.(\d+)\.output\.LayerNorm\.": r"blocks.\1.norm2.",
    r"pooler\.dense\.": "pooler.",
}
GPT_NAMES = {
    r"tokens_embed\.": "words.",
    r"positions_embed\.": "positions.",
    r"h\.(\d+)\.attn\.c_attn\.": r"blocks.\1.attn.qkv.",
    r"h\.(\d+)\.attn\.c_proj\.": r"blocks.\1.attn.proj.",
    r"h\.(\d+)\.ln_(\d)\.": r"blocks.\1.norm\2.",
    r"h\.(\d+)\.mlp\.c_fc\.": r"blocks.\1.mlp.fc1.",
    r"h\.(\d+)\.mlp\.c_proj\.": r"blocks.\1.mlp.fc2.",
}
ADDED_WORDS = 3  # of GPT's fine-tuning: start, delimiter and end
# Names of BERT's head of words by those of ``heads.language_model``.
WORD_HEAD = {
    "cls.predictions.bias": "bias",
    "cls.predictions.transform.dense.weight": "transform.0.weight",
    "cls.predictions.transform.dense.bias": "transform.0.bias",
    "cls.predictions.transform.LayerNorm.weight": "transform.2.weight",
    "cls.predictions.transform.LayerNorm.bias": "transform.2.bias",
}
HEADS = ("cls.", "classifier.", "lm_head.", "multiple_choice_head.", "qa_outputs.")


class TextAttention(nn.Module):
    """Multi-head attention that leaves padding out, or later tokens: (B, L, C) -> (B, L, C)."""

    def __init__(self, dim: int, heads: int, drop: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.drop, self.causal = heads, drop, causal
        self.query, self.key, self.value, self.proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend: (B, L, C) and real tokens (B, L) -> (B, L, C)."""
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        visible = None if mask is None or self.causal else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=self.causal,
            dropout_p=self.drop if self.training else 0.0,
        )  # fmt: skip
        return self.proj(y.transpose(1, 2).flatten(2))


class TanhGELUFFN(PointwiseMixer):
    """W2 gelu(W1 x) with GELU by a hyperbolic tangent, as in GPT-1: (..., C) -> (..., C)."""

    value_layer = "fc2"
    channel_mappings = ("fc1",)

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 gelu(W1 x): (..., C) -> (..., C)."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class TextBlock(nn.Module):
    """norm(x + attn(x)), then norm(x + FFN(x)): (B, L, C) -> (B, L, C)."""

    def __init__(
        self, dim: int, heads: int, *, drop: float, rate: float, causal: bool, eps: float,
        mlp: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attn: nn.Module = TextAttention(dim, heads, drop, causal)
        self.mlp = mlp
        self.norm1, self.norm2 = (nn.LayerNorm(dim, eps=eps) for _ in range(2))
        self.drop = nn.Dropout(drop)
        self.drop_path = DropPath(rate) if rate else nn.Identity()
        self.by_length: set[str] = set()  # slots of mixers that read padding

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Apply token and channel mixer, each with its shortcut: (B, L, C) -> (B, L, C)."""
        y = self._mix("attn", x, mask) if isinstance(self.attn, Mixer) else self.attn(x, mask)
        x = self.norm1(x + self.drop_path(self.drop(y)))
        return self.norm2(x + self.drop_path(self.drop(self._mix("mlp", x, mask))))

    def _mix(self, slot: str, x: Tensor, mask: Tensor | None) -> Tensor:
        """Apply a mixer to a map of one row: (B, L, C) -> (B, L, C)."""
        mixer = getattr(self, slot)
        if slot in self.by_length and mask is not None:
            return mix_by_length(mixer, x, mask)
        with real_tokens(mask):
            return mixer(x.unsqueeze(1)).squeeze(1)


class TextEncoder(Backbone):
    """BERT (bidirectional) or GPT-1 (causal).

    Args:
        config: See ``HostConfig``.
        words: Size of the vocabulary.
        dim: C.
        depth: Blocks.
        heads: Heads of the attention.
        drop: Dropout of embeddings, attention and both branches.
        most_tokens: Number of positions.
        causal: Build GPT-1: tokens see earlier ones alone, no segments, and no pooler.
        eps: Of the norms.

    Attributes:
        word_head: Tensors of the head of words in a loaded file of BERT, by our names.
    """

    modality = MODALITY
    size_divisor = 1
    block_layout = "tokens"
    classification_keys = ("pooler.",)
    layer_names = LayerNames(stem=EMBEDDINGS, tail=EMBEDDINGS)

    def __init__(
        self, config: HostConfig, *, words: int, dim: int, depth: int, heads: int, drop: float,
        most_tokens: int, causal: bool, eps: float,
    ) -> None:  # fmt: skip
        super().__init__()
        if config.img_size[1] > most_tokens:
            raise ValueError(
                f"this network has {most_tokens} positions, fewer than {config.img_size[1]} "
                f"tokens; pass data.max_tokens={most_tokens}"
            )
        self.word_head: dict[str, Tensor] = {}
        self.causal, self.num_features, self.img_size = causal, dim, config.img_size
        self.feature_info = (FeatureInfo(dim, 1),)
        self.pooling = "last token" if causal else "first token"
        self.words = nn.Embedding(words, dim)
        self.positions = nn.Embedding(most_tokens, dim)
        self.segments = None if causal else nn.Embedding(2, dim)
        self.norm = None if causal else nn.LayerNorm(dim, eps=eps)
        self.drop = nn.Dropout(drop)
        hidden = int(RATIO * dim)
        self.blocks = nn.ModuleList(
            TextBlock(
                dim, heads, drop=drop, rate=rate, causal=causal, eps=eps,
                mlp=TanhGELUFFN(dim, hidden) if causal else FFN(dim, hidden_ratio=RATIO),
            )
            for rate in drop_path_rates(config.drop_path_rate, depth)
        )  # fmt: skip
        self.pooler = None if causal else nn.Linear(dim, dim)
        self.apply(_init)
        for index, part in enumerate(self.blocks):
            block = cast("TextBlock", part)
            slot = Slot(dim, RATIO, (1, config.img_size[1]), 0, index, dense=config.dense)
            for name, factory in (("mlp", config.channel_mixer), ("attn", config.token_mixer)):
                fill(block, name, factory, slot)
                if factory_at(factory, slot) is None:
                    continue
                kind: Kind = "channel" if name == "mlp" else "token"
                if fit_to_texts(getattr(block, name), kind, dim, causal):
                    block.by_length.add(name)

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return pairs of texts, the second without its last token."""
        tokens = torch.randint(len(self.words.weight), (2, min(self.img_size[1], 8)))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[1, -1] = False
        return tokens, torch.arange(tokens.shape[1]).expand_as(tokens) // 5, mask

    def map_shapes(self, images: Tensor) -> list[tuple[int, ...]]:
        """Return the shape (B, C, L) of the map for tokens (B, L)."""
        return [(images.shape[0], self.num_features, images.shape[1])]

    def encode(
        self, tokens: Tensor, segments: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the last block's output.

        Args:
            tokens: Numbers of words (B, L).
            segments: 0 for the first and 1 for the second sentence (B, L); None for zeros.
            mask: True for real tokens (B, L); None if all are.

        Shape: -> (B, L, C).
        """
        x = self.words(tokens.long()) + self.positions.weight[: tokens.shape[1]]
        if self.segments is not None:
            x = x + self.segments(
                (torch.zeros_like(tokens) if segments is None else segments).long()
            )
        x = self.drop(x if self.norm is None else self.norm(x))
        for block in self.blocks:
            x = block(x, mask)
        return x

    def forward(
        self, images: Tensor, segments: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the features of tokens as one map: (B, L) -> (B, C, L)."""
        return (self.encode(images, segments, mask).transpose(1, 2),)

    def embed(
        self, images: Tensor, segments: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the pooled first token of BERT, or the last real one of GPT: (B, L) -> (B, C)."""
        return self.pool(self.encode(images, segments, mask), mask)

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the embedding of the last block's output: (B, L, C) -> (B, C)."""
        if self.pooler is not None:
            return torch.tanh(self.pooler(x[:, 0]))
        if mask is None:
            return x[:, -1]
        last = mask.long().sum(1) - 1
        return x[torch.arange(len(x), device=x.device), last]

    def has_source_names(self, names: Collection[str]) -> bool:
        """Return True for files of transformers with a head, whose names must stay whole."""
        return any(
            key.startswith(("bert.embeddings.", "transformer.tokens_embed.")) for key in names
        )

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Map the names of transformers to ours, and leave out its heads; ours pass unchanged.

        Raises:
            ValueError: The file has another vocabulary.
        """
        names = GPT_NAMES if self.causal else BERT_NAMES
        converted: dict[str, Tensor] = {}
        words_weight = self.words.weight.detach()
        for key, value in state_dict.items():
            ours = re.sub(r"^(bert|transformer)\.", "", key)
            ours = ours.replace("LayerNorm.gamma", "LayerNorm.weight")
            ours = ours.replace("LayerNorm.beta", "LayerNorm.bias")
            if ours in WORD_HEAD and not self.causal:
                self.word_head[WORD_HEAD[ours]] = value
            renamings = [item for item in names.items() if re.match(item[0], ours)]
            if renamings:
                converted |= _parts(re.sub(*renamings[0], ours), value, self.causal)
            elif not ours.startswith(HEADS) and not ours.endswith(("position_ids", "attn.bias")):
                converted[key] = value
        words = converted.get("words.weight")
        if self.pooler is not None and "words.weight" in converted.keys() - state_dict.keys():
            if "pooler.weight" not in converted:  # of BertForMaskedLM
                logger.warning("the file lacks BERT's pooler, which starts from random weights")
                own_pooler = self.pooler.state_dict(prefix="pooler.")
                converted |= {name: value.clone() for name, value in own_pooler.items()}
        if self.causal and words is not None and len(words_weight) - len(words) == ADDED_WORDS:
            # The tokens of fine-tuning, which GPT-1's files lack, keep their random values.
            converted["words.weight"] = torch.cat([words, words_weight[len(words) :].to(words)])
        elif (
            words is not None
            and words.shape[1:] == words_weight.shape[1:]
            and len(words) != len(words_weight)
        ):
            raise ValueError(
                f"the pretrained file has {len(words)} words, but the tokenizer of the data has "
                f"{len(words_weight)}; pass data.tokenizer=<folder of the file's tokenizer>"
            )
        return converted


def _parts(name: str, value: Tensor, transposed: bool) -> dict[str, Tensor]:
    """Return a tensor by our name; GPT's matrices are transposed, with q, k and v in one."""
    if transposed and value.ndim == 2 and name.startswith("blocks."):
        value = value.T
    if ".attn.qkv." not in name:
        return {name: value}
    parts = ("query", "key", "value")
    return {
        name.replace("qkv", part): tensor
        for part, tensor in zip(parts, value.chunk(3), strict=True)
    }


def _init(part: nn.Module) -> None:
    if isinstance(part, nn.Linear | nn.Embedding):
        nn.init.normal_(part.weight, std=INIT)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)


def _register(
    name: str, source: str, sizes: tuple[int, int, int, int], causal: bool, words: int
) -> None:
    dim, depth, heads, most = sizes

    @register_host(
        name, source=source, plain_ffn=not causal,
        own_token_mixer="attention" if causal else None, **TEXT_HOST,
    )  # fmt: skip
    def build(config: HostConfig, *, vocabulary: int = words, drop: float = 0.1) -> TextEncoder:
        refuse_pretrained(name, config)
        return TextEncoder(
            config, words=vocabulary, dim=dim, depth=depth, heads=heads, drop=drop,
            most_tokens=most, causal=causal, eps=GPT_EPS if causal else BERT_EPS,
        )  # fmt: skip

    build.__doc__ = f"""{depth} blocks of width {dim} with {heads} heads.

    Args:
        config: See ``HostConfig``.
        vocabulary: Number of words; data modules pass their own.
        drop: Dropout of embeddings, attention and both branches.
    """


BERT, GPT = "BERT (NAACL 2019)", "GPT (2018)"
_register("bert_tiny", f"{BERT}, for small data", (64, 2, 4, 512), False, BERT_WORDS)
_register("bert_base", f"{BERT}, Sec. 3", (768, 12, 12, 512), False, BERT_WORDS)
_register("bert_large", f"{BERT}, Sec. 3", (1024, 24, 16, 512), False, BERT_WORDS)
_register("gpt1", f"{GPT}, Sec. 4.1", (768, 12, 12, 512), True, GPT_WORDS)
_register("gpt_tiny", f"{GPT}, for small data", (64, 2, 4, 512), True, GPT_WORDS)
