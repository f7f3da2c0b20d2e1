"""Languages of a multilingual model: a tokenizer is told them, and an answer begins in the right one."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

from ..errors import DeltuneError, unknown_name

PAIRS = """
    af=afr ar=arb az=azj bn=ben bg=bul ca=cat cs=ces da=dan de=deu el=ell en=eng es=spa et=est fa=pes fi=fin
    fr=fra gl=glg gu=guj he=heb hi=hin hr=hrv hu=hun id=ind it=ita ja=jpn ka=kat kk=kaz km=khm ko=kor lt=lit
    lv=lvs mk=mkd ml=mal mn=khk mr=mar my=mya ne=npi nl=nld no=nob pl=pol ps=pbt pt=por ro=ron ru=rus si=sin
    sk=slk sl=slv sv=swe sw=swh ta=tam te=tel th=tha tl=tgl tr=tur uk=ukr ur=urd uz=uzn vi=vie xh=xho zh=zho
"""
THREE = dict(pair.split("=") for pair in PAIRS.split())
"""ISO 639-1 -> ISO 639-3, of a macrolanguage its standard variety, for tokenizers that write the latter."""


def language_codes(tokenizer: Any) -> list[str]:
    """The languages that a tokenizer can be told (`src_lang`, `tgt_lang`), as it writes them; none of any other."""
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        return []
    named = getattr(tokenizer, "lang_code_to_token", None) or getattr(tokenizer, "lang_code_to_id", None)
    return sorted(named or (t for t in tokenizer.all_special_tokens if re.fullmatch(r"[a-z]{2,3}_[A-Za-z]{2,4}", t)))


def language_code(language: str, there: list[str]) -> str:
    """A tokenizer's own code (en_XX, eng_Latn) for a language (en, eng), or the code itself.

    Errors: a language that it lacks; several codes that fit, as of languages with two scripts.
    """
    if language in there:
        return language
    plain = {language, THREE.get(language, language)}
    found = [own for own in there if own.partition("_")[0] in plain]
    if len(found) > 1:
        raise DeltuneError(f"language {language!r} is {' or '.join(found)} to this tokenizer; give one of these")
    if not found:
        raise DeltuneError(unknown_name("language", language, there))
    return found[0]


def tokenizer_languages(tokenizer: Any) -> tuple[str | None, str | None]:
    """Of its texts and of its targets, as it was told."""
    return getattr(tokenizer, "src_lang", None), getattr(tokenizer, "tgt_lang", None)


def set_languages(tokenizer: Any, source: str | None, target: str | None) -> None:
    """Tell a tokenizer its languages; None: as it is. Errors: it has none, or lacks this one."""
    there = language_codes(tokenizer)
    for name, option, language in (("src_lang", "source", source), ("tgt_lang", "target", target)):
        if language is not None and not there:
            raise DeltuneError(
                f"{type(tokenizer).__name__} has no languages to choose from; leave {option}_language={language} out"
            )
        if language is not None:
            setattr(tokenizer, name, language_code(language, there))


def forced_bos_options(tokenizer: Any, model: Any) -> dict[str, int | None]:
    """Options of `generate` for an answer that begins as the targets did in training; none without languages.

    A target's language is its first token, which is forced then, or its last, which the model moves to the front.
    """
    if not language_codes(tokenizer):
        return {}
    if getattr(tokenizer, "tgt_lang", "") is None:
        warnings.warn(
            f"{type(tokenizer).__name__} was given no target language: answers begin as in the texts'. Give "
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
