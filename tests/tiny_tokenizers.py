"""Small tokenizers of every kind, trained in memory, and the text that their library decodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from control_plane.text_codec import TextCodec

if TYPE_CHECKING:
    from collections.abc import Sequence

_CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "hello world, how are you today? I am fine, thank you.",
    "ENDING the END of a sentence. STOP it. stop, stopped, stopping",
    "naïve café über straße 你好 世界 😀 😁 👩‍👩‍👧",
] * 5
_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]


@dataclass(frozen=True)
class Tiny:
    """A tokenizer, the codec under test, and the library's own decoding."""

    name: str
    backend: Tokenizer
    codec: TextCodec
    vocab_size: int

    def ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def added_text(
        self, prompt: Sequence[int], ids: Sequence[int], *, skip_special_tokens: bool
    ) -> str:
        """What decoding prompt and ids at once adds to decoding the prompt alone."""
        skip = skip_special_tokens
        base = self.backend.decode(list(prompt), skip_special_tokens=skip)
        whole = self.backend.decode([*prompt, *ids], skip_special_tokens=skip)
        common = 0
        while common < min(len(base), len(whole)) and base[common] == whole[common]:
            common += 1
        return whole[common:]


def _finish(name: str, backend: Tokenizer) -> Tiny:
    # Past the tokenizer's own: a model's vocabulary is often padded.
    vocab_size = backend.get_vocab_size(with_added_tokens=True) + 3
    return Tiny(name, backend, TextCodec(backend, vocab_size=vocab_size), vocab_size)


def byte_level() -> Tiny:
    """GPT-2's kind, as most models of today."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_tokens(["<tool call>"])
    return _finish("byte_level", backend)


def sentencepiece() -> Tiny:
    """Llama 2's kind: pieces with a space mark, bytes as a fallback."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=_SPECIAL, show_progress=False)
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(_CORPUS[:3], trainer)
    vocabulary = trained.get_vocab(with_added_tokens=False)
    # As plain tokens of the model, not as special ones, which would be skipped.
    for token in byte_tokens:
        vocabulary[token] = len(vocabulary)
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.add_special_tokens(_SPECIAL)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finish("sentencepiece", backend)


def metaspace() -> Tiny:
    """T5's kind: unigrams with a space mark."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return _finish("metaspace", backend)


def word_piece() -> Tiny:
    """BERT's kind: continuation marks."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=_SPECIAL, show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return _finish("word_piece", backend)


ALL = {build.__name__: build() for build in (byte_level, sentencepiece, metaspace, word_piece)}
