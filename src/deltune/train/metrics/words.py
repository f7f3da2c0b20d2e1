"""Words of texts in any script, for metrics that count words, and the refusal of texts without one.

Chinese, Japanese, Thai and other scripts write no blanks between words. There every character counts as a word, as with
sacreBLEU's tokenizer zh; nothing else about a text changes, so English scores stay those of the official programs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import regex

from ...errors import DeltuneError, excerpt, is_installed, unknown_name

UNSPACED_SCRIPTS = (
    "Han", "Hiragana", "Katakana", "Bopomofo", "Yi", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan", "Javanese",
    "Balinese", "Tai_Le", "New_Tai_Lue", "Tai_Tham", "Tai_Viet",
)  # fmt: skip
"""The scripts that write no blanks between words."""

_SCRIPTS = "".join(rf"\p{{{script}}}" for script in UNSPACED_SCRIPTS)
# beside the scripts CJK punctuation, marks of kana and full-width forms; each with its combining marks
_UNSPACED = regex.compile(rf"(?=[{_SCRIPTS}\u3001-\u303f\u30a0-\u30ff\uff00-\uffef])\X\p{{M}}*")
_WORD = regex.compile(r"[\p{L}\p{N}][\p{L}\p{M}\p{N}\u200c\u200d]*")
_OTHER_LETTER = regex.compile(r"(?V1)[[\p{L}\p{N}]--\p{ASCII}]|[A-Za-z0-9]\p{M}")
_LETTER, _LATIN = regex.compile(r"\p{L}"), regex.compile(r"(?V1)[\p{L}&&\p{Latin}]")
_OTHER_PUNCTUATION = regex.compile(r"(?V1)[\p{P}--[\u0000-\u036f\u2000-\u2bff]]")

MECAB_PACKAGES = {"ja-mecab": ("mecab-python3", "ja"), "ko-mecab": ("mecab-ko", "ko")}
"""The tokenizers of sacreBLEU that need a package, with the extra of sacreBLEU that installs it."""


class CannotScoreError(DeltuneError):
    """Raised by a metric that has no meaning for these texts; it is left out, and the message says why."""


def separate_characters(text: str) -> str:
    """Put blanks around every character of a script that writes none between words; other text stays as it is."""
    return text if text.isascii() else _UNSPACED.sub(r" \g<0> ", text)


def unspaced_signature(texts: Iterable[str]) -> dict[str, str]:
    """Return what a signature says where characters of some text count as words; empty for all other texts."""
    return {"unspaced": "characters"} if any(_UNSPACED.search(text) for text in texts if not text.isascii()) else {}


def is_ascii_worded(text: str) -> bool:
    """Return whether all letters and digits of a text are ASCII, so that rouge-score's own tokenizer reads it all."""
    return text.isascii() or not _OTHER_LETTER.search(unicodedata.normalize("NFC", text))


def is_latin(text: str) -> bool:
    """Return whether at least half of the letters of a text are Latin ones."""
    return 2 * len(_LATIN.findall(text)) >= len(_LETTER.findall(text))


def without_punctuation_of_other_scripts(text: str) -> str:
    """Remove punctuation that is of no European script, such as the full stops of Chinese and Hindi."""
    return text if text.isascii() else _OTHER_PUNCTUATION.sub("", text)


def words(text: str) -> list[str]:
    """Return the runs of letters and digits of a text in lower case, and single characters of unspaced scripts.

    Of ASCII text these are the words of rouge-score, [a-z0-9]+. Combining marks belong to their letter.
    """
    return list(_WORD.findall(separate_characters(unicodedata.normalize("NFC", text.lower()))))


def sacrebleu_tokenizer(name: str) -> Callable[[str], str]:
    """Return a tokenizer of sacreBLEU."""
    from sacrebleu.metrics.bleu import BLEU

    if name not in BLEU.TOKENIZERS:
        raise DeltuneError(unknown_name("tokenizer", name, ["auto", *BLEU.TOKENIZERS]))
    with refuse_downloads(name):
        tokenizer: Callable[[str], str] = BLEU(tokenize=name).tokenizer
    return tokenizer


@contextmanager
def refuse_downloads(name: Any) -> Iterator[None]:
    """Say of a tokenizer of sacreBLEU which downloads its vocabulary that this has failed."""
    try:
        yield
    except OSError as error:
        raise DeltuneError(
            f"tokenizer {name} downloads its vocabulary, which failed ({error}): choose another, such as 13a or intl"
        ) from error


def missing_mecab(name: str) -> str | None:
    """Return what a tokenizer of sacreBLEU needs and is missing, or None."""
    package, extra = MECAB_PACKAGES.get(name, ("sacrebleu", ""))
    return None if is_installed(package) else f"tokenizer {name} needs {package}: pip install 'sacrebleu[{extra}]'"


WORDLESS = "have no word in their references, so that identical texts would score 0 (chrf and exact compare characters)"


def refuse_rows(
    references: Sequence[Sequence[str]], fits: Callable[[str], Any], problem: str = WORDLESS
) -> dict[str, int]:
    """Refuse to score references none of which a metric can read."""
    rows = [i for i, accepted in enumerate(references) if not any(map(fits, accepted))]
    if rows and len(rows) == len(references):
        raise CannotScoreError(f"{len(rows):,} of {len(rows):,} rows {problem}, such as {excerpt(references[0][0])}")
    return {"unread": len(rows)} if rows else {}
