import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import CORPUS, byte_level, front, sentencepiece, wordpiece

from headrace.front.detokenizer import WindowDetokenizer, detokenize
from headrace.front.tokenizer import Tokenizer

BYTE_LEVEL, SENTENCEPIECE, WORDPIECE = front(byte_level()), front(sentencepiece()), front(wordpiece())
SPECIAL_TEXT = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<tool call>", "</s>", " ", "\n", "\U0001f469‍\U0001f467", "ü"]
)
TEXT = st.lists(st.one_of(SPECIAL_TEXT, st.text(max_size=8)), max_size=12).map("".join)


def surrogate_free(text: str) -> str:
    return text.encode("utf-8", "ignore").decode()


def deltas(tokenizer: Tokenizer, tokens: list[int], skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 5), max_size=40), st.booleans())
@settings(max_examples=300)
def test_byte_level_deltas_joined_equal_the_whole_decode_for_any_tokens(tokens: list[int], skip: bool) -> None:
    assert "".join(deltas(BYTE_LEVEL, tokens, skip)) == BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)


@given(TEXT, st.booleans())
@settings(max_examples=200)
def test_every_text_comes_back_and_no_broken_character_is_ever_out(text: str, skip: bool) -> None:
    text = surrogate_free(text).replace("�", "")
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        tokens = tokenizer.encode(text)
        parts = deltas(tokenizer, tokens, skip)
        assert not any("�" in part for part in parts)
        assert parts[-1] == ""
        joined = "".join(parts)
        whole = tokenizer.decode(tokens, skip_special_tokens=skip)
        # Sentencepiece-like decoders strip the space they put before a text; a continuation keeps it.
        assert joined in (whole, " " + whole)


@given(st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), max_size=40), st.booleans())
@settings(max_examples=300)
def test_sentencepiece_deltas_equal_the_whole_decode_in_context(tokens: list[int], skip: bool) -> None:
    prompt = SENTENCEPIECE.encode("the fox")
    before = SENTENCEPIECE.decode(prompt, skip_special_tokens=skip)
    whole = SENTENCEPIECE.decode(prompt + tokens, skip_special_tokens=skip)
    joined = "".join(deltas(SENTENCEPIECE, tokens, skip))
    # The library reads a run of byte tokens as a whole and gives one U+FFFD per byte where any of them is wrong; here
    # characters come out as they complete and only wrong bytes are replaced.
    if "�" in joined:
        assert "�" in whole
    else:
        assert before + joined == whole


@given(st.lists(st.integers(0, WORDPIECE.vocab_size - 1), max_size=40))
@settings(max_examples=100)
def test_any_other_decoder_goes_through_a_window(tokens: list[int]) -> None:
    assert not WORDPIECE.pieces.whole
    assert "".join(deltas(WORDPIECE, tokens, False)) == WORDPIECE.decode(tokens)


def test_incomplete_character_is_held_until_its_last_byte() -> None:
    single = {BYTE_LEVEL.token_bytes(token): token for token in range(BYTE_LEVEL.vocab_size)}
    tokens = [single[bytes([byte])] for byte in "\U0001f600!".encode()]
    assert deltas(BYTE_LEVEL, tokens, True) == ["", "", "", "\U0001f600", "!", ""]
    assert deltas(BYTE_LEVEL, tokens[:2], True) == ["", "", "�"]
    fallback = [SENTENCEPIECE.token_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    assert deltas(SENTENCEPIECE, [token for token in fallback if token is not None], True) == ["", "é", ""]


def test_leading_space_of_a_continuation_stays() -> None:
    tokens = SENTENCEPIECE.encode("the fox")[1:]
    assert detokenize(SENTENCEPIECE.detokenizer(), tokens) == " fox"


def test_special_tokens_are_left_out_only_where_asked() -> None:
    tokens = BYTE_LEVEL.encode("a<|im_end|>b<tool call>")
    assert detokenize(BYTE_LEVEL.detokenizer(True), tokens) == "ab<tool call>"
    assert detokenize(BYTE_LEVEL.detokenizer(False), tokens) == "a<|im_end|>b<tool call>"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_bytes_of_the_tokens_joined_are_the_text(tokenizer: Tokenizer) -> None:
    for text in CORPUS:
        joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        assert joined.decode().removeprefix(" " if tokenizer is SENTENCEPIECE else "") == text


def test_window_stays_short() -> None:
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return WORDPIECE.decode(tokens)

    text = detokenize(WindowDetokenizer(decode, frozenset()), [2, 3, 4] * 500)
    assert len(text) > 500
    assert longest <= 2 * WindowDetokenizer.LIMIT
