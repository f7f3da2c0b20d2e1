"""The languages of a multilingual tokenizer, and the first token by which a generated text is in the right one."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

from ..errors import DeltuneError, unknown_name

_CODE_PAIRS = """
    af=afr ar=arb az=azj bn=ben bg=bul ca=cat cs=ces da=dan de=deu el=ell en=eng es=spa et=est fa=pes fi=fin
    fr=fra gl=glg gu=guj he=heb hi=hin hr=hrv hu=hun id=ind it=ita ja=jpn ka=kat kk=kaz km=khm ko=kor lt=lit
    lv=lvs mk=mkd ml=mal mn=khk mr=mar my=mya ne=npi nl=nld no=nob pl=pol ps=pbt pt=por ro=ron ru=rus si=sin
    sk=slk sl=slv sv=swe sw=swh ta=tam te=tel th=tha tl=tgl tr=tur uk=ukr ur=urd uz=uzn vi=vie xh=xho zh=zho
"""
ISO_639_3 = dict(pair.split("=") for pair in _CODE_PAIRS.split())
"""ISO 639-1 -> ISO 639-3 (for a macrolanguage, of its standard variety), for tokenizers that use the latter."""


def language_codes(tokenizer: Any) -> list[str]:
    """Return the codes that a tokenizer takes as `src_lang` and `tgt_lang`; none if it is not multilingual."""
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        return []
    codes = getattr(tokenizer, "lang_code_to_token", None) or getattr(tokenizer, "lang_code_to_id", None)
    return sorted(codes or (t for t in tokenizer.all_special_tokens if re.fullmatch(r"[a-z]{2,3}_[A-Za-z]{2,4}", t)))


def language_code(language: str, codes: list[str]) -> str:
    """Return a tokenizer's code for a language.

    Args:
        language: ISO 639-1 or 639-3 (en, eng), or one of the codes itself.
        codes: The tokenizer's codes, such as en_XX or eng_Latn.

    Raises:
        DeltuneError: No code fits, or several do, as for languages with two scripts.
    """
    if language in codes:
        return language
    iso_codes = {language, ISO_639_3.get(language, language)}
    matches = [code for code in codes if code.partition("_")[0] in iso_codes]
    if len(matches) > 1:
        raise DeltuneError(f"language {language!r} is {' or '.join(matches)} to this tokenizer; give one of these")
    if not matches:
        raise DeltuneError(unknown_name("language", language, codes))
    return matches[0]


def tokenizer_languages(tokenizer: Any) -> tuple[str | None, str | None]:
    """Return the languages of a tokenizer's texts and targets; None where it has none."""
    return getattr(tokenizer, "src_lang", None), getattr(tokenizer, "tgt_lang", None)


def set_languages(tokenizer: Any, source: str | None, target: str | None) -> None:
    """Set the languages of a tokenizer, in place.

    Args:
        tokenizer: The tokenizer of a multilingual model.
        source: The language of the texts; None leaves it as it is.
        target: The language of the targets; None leaves it as it is.

    Raises:
        DeltuneError: The tokenizer is not multilingual, or does not have the language.
    """
    codes = language_codes(tokenizer)
    for name, option, language in (("src_lang", "source", source), ("tgt_lang", "target", target)):
        if language is not None and not codes:
            raise DeltuneError(
                f"{type(tokenizer).__name__} has no languages to choose from; leave {option}_language={language} out"
            )
        if language is not None:
            setattr(tokenizer, name, language_code(language, codes))


def forced_bos_options(tokenizer: Any, model: Any) -> dict[str, int | None]:
    """Return the options by which `generate` begins an answer as the targets began in training.

    The language of a target is its first token, which is then forced, or its last one, which the model moves to the
    front.

    Args:
        tokenizer: A tokenizer, with its languages set.
        model: The encoder-decoder.

    Returns:
        Options of `generate`; none if the tokenizer is not multilingual.
    """
    if not language_codes(tokenizer):
        return {}
    if getattr(tokenizer, "tgt_lang", "") is None:
        warnings.warn(
            f"{type(tokenizer).__name__} has no target language, so answers are in the language of the texts. Give "
            "source_language and target_language",
            stacklevel=2,
        )
    empty = tokenizer(text_target="")["input_ids"]
    forced = None if empty[0] == tokenizer.eos_token_id else empty[0]
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shifted is None:
        return {"forced_bos_token_id": forced}
    start = int(shifted(labels=torch.tensor([empty], device=model.device))[0, 0])
    return {"forced_bos_token_id": forced, "decoder_start_token_id": start}
