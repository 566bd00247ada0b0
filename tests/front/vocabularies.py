"""Small tokenizers of the two kinds that exist, built here: byte-level BPE and sentencepiece-like."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headrace.front.tokenizer import Tokenizer as FrontTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. In 1984, 12 of them did!\n\n\tYes.",
    "Größe, naïve façade, 日本語のテキスト, здравствуй мир, \U0001f600\U0001f469‍\U0001f469‍\U0001f467.",
    "def main(argv: list[str]) -> int:\n    return 0  # done\n",
] * 3
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level() -> Tokenizer:
    """As SmolLM2's: digits one by one, bytes spelt as characters, every byte a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2's: spaces spelt with U+2581, unknown characters as byte tokens."""
    letters = sorted(set("".join(CORPUS[:1]).replace(" ", "▁")) | {"▁"})
    words = ["▁t", "▁th", "▁the", "he", "ox", "▁f", "▁fo", "▁fox", "▁▁"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("o", "x"), ("▁", "f"), ("▁f", "o"), ("▁fo", "x")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocab, [*merges, ("▁", "▁")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    """A decoder that joins tokens by a rule of its own."""
    words = ["[UNK]", "[SEP]", "the", "fox", "##es", "##ing", "run", "a", "jump", ".", ","]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """A model folder with everything the front reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "unk_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.6}))
    return folder


def front(tokenizer: Tokenizer) -> FrontTokenizer:
    return FrontTokenizer(tokenizer, {}, {})
