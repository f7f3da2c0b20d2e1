"""Tag schemes, by which tags say where entities begin and end: recognised from the tags, and converted to IOB2."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise

from ...errors import DeltuneError, counted, excerpt, word_list
from ...models import OUTSIDE

PLAIN = "plain"
"""Tags that are classes of words, such as parts of speech."""
SCHEMES: Mapping[str, str] = {"IOB2": "BI", "IOB1": "BI", "BIOES": "BIES", "BILOU": "BILU"}
"""Scheme of entities -> the prefixes of its tags. Of those with four, the third ends an entity of several words."""
CONVERT = "--tag-scheme iob2 converts all tags: an entity begins at B, S or U, and at any tag that continues none"
AS_CLASSES = "--tag-scheme plain takes all tags for classes of words"
MAX_ROWS_NAMED = 5


def is_entity_tag(text: str) -> bool:
    """Return whether a text looks like the tag of an entity, such as B-PER; O does not."""
    return re.fullmatch(r"[BIESLUM][-_].+", text, re.DOTALL) is not None


def recognise_scheme(rows: Iterable[tuple[str, Sequence[str]]]) -> str | None:
    """Recognise the scheme of tags: that in which every tag of every row is part of a whole entity, or O.

    The rows are places and tags, and are gone through several times.
    """
    entity_tags = check_entity_tags(rows)
    if entity_tags is None:
        return None
    if not entity_tags:
        return PLAIN
    steps = {step for _, row in rows for step in _steps(row)}
    for scheme in SCHEMES:
        if all(_may_follow(scheme, *step) for step in steps):
            return scheme
    prefixes = {tag[0] for tag in entity_tags}
    if prefixes <= {"I", "E"}:
        raise DeltuneError(
            f"the scheme of the tags is IOE, where E ends an entity, and it is not read as it is. {CONVERT}"
        )
    if "M" in prefixes:
        raise DeltuneError(f"the scheme of the tags is BMES, where M is for I, and it is not read as it is. {CONVERT}")
    misfits = {scheme: sum(_wrong_step(scheme, row) is not None for _, row in rows) for scheme in SCHEMES}
    likeliest = min(SCHEMES, key=misfits.__getitem__)
    wrong = (_misfit(likeliest, row, place) for place, row in rows if _wrong_step(likeliest, row))
    named = [*islice(wrong, MAX_ROWS_NAMED)]
    more, right = misfits[likeliest] - len(named), sum(1 for _ in rows) - misfits[likeliest]
    raise DeltuneError(
        f"the tags of {counted(right, 'row')} are {likeliest}, and of "
        f"{misfits[likeliest]:,} they are not: {'; '.join(named)}{f' and {more:,} more' if more else ''}. Correct "
        f"these rows; or {CONVERT}"
    )


def check_entity_tags(rows: Iterable[tuple[str, Sequence[str]]]) -> set[str] | None:
    """Return the tags of entities, none if the tags are plain, and None if there is no tag but O."""
    tags = {tag for _, row in rows for tag in row} - {OUTSIDE}
    if not tags:
        return None
    # without types the prefixes are the tags; single letters among others are parts of speech
    bare = tags if tags <= set("BIESLUM") and tags & {"B", "I"} else set()
    entity_tags = {tag for tag in tags if is_entity_tag(tag)} or bare
    if not entity_tags and all(re.fullmatch(r".+[-_][BIESLU]", tag, re.DOTALL) for tag in tags):
        raise DeltuneError(
            f"the tags have their prefixes at the end, such as {excerpt(min(tags))}: write them in front, such as "
            f"B-PER; or {AS_CLASSES}"
        )
    if not entity_tags and any(is_entity_tag(tag.upper()) for tag in tags):
        lower = min(tag for tag in tags if is_entity_tag(tag.upper()))
        raise DeltuneError(
            f"the prefixes of the tags are small letters, such as {excerpt(lower)}: write {excerpt(lower.upper())} and "
            f"O; or {AS_CLASSES}"
        )
    if entity_tags and (foreign := tags - entity_tags):
        places = [*islice((place for place, row in rows if not foreign.isdisjoint(row)), MAX_ROWS_NAMED)]
        listed = ", ".join(excerpt(tag) for tag in sorted(foreign)[:MAX_ROWS_NAMED])
        raise DeltuneError(
            f"the tags are of entities, such as {excerpt(min(entity_tags))}, but {listed} in "
            f"{', '.join(places)} {'are' if len(foreign) > 1 else 'is'} not. Correct these rows; or "
            f"{AS_CLASSES}"
        )
    return entity_tags


def to_iob2(tags: Iterable[str]) -> list[str]:
    """Return tags of entities in IOB2, from any scheme or a mixture of several.

    An entity begins at B, S and U, and at any other tag that does not continue an entity of its type.
    """
    converted, before = [], OUTSIDE
    for tag in tags:
        continues = tag[0] not in "BSU" and before[0] in "BIM" and before[1:] == tag[1:]
        converted.append(tag if tag == OUTSIDE else f"{'I' if continues else 'B'}{tag[1:]}")
        before = tag
    return converted


def _steps(row: Sequence[str]) -> Iterable[tuple[str, str]]:
    """The tags of a row, each with the tag before it; O stands before the first and behind the last."""
    return pairwise([OUTSIDE, *row, OUTSIDE])


def _may_follow(scheme: str, before: str, tag: str) -> bool:
    """Return whether a tag may stand behind another one, O or itself of the scheme."""
    prefixes = SCHEMES[scheme]
    if tag[0] not in prefixes + OUTSIDE:
        return False
    is_open, same_type = before[0] in "BI", before[1:] == tag[1:]
    if len(prefixes) == 2:  # I continues an entity in IOB2, and B one of the same type in IOB1
        return tag[0] != {"IOB2": "I", "IOB1": "B"}[scheme] or (is_open and same_type)
    continues = tag[0] in ("I", prefixes[2])
    return continues == is_open and (same_type or not continues)


def _wrong_step(scheme: str, row: Sequence[str]) -> tuple[str, str] | None:
    return next((step for step in _steps(row) if not _may_follow(scheme, *step)), None)


def _misfit(scheme: str, row: Sequence[str], place: str) -> str:
    """Say why a row is not of a scheme, and of which it is."""
    before, tag = _wrong_step(scheme, row) or ("", "")
    others = [other for other in SCHEMES if not _wrong_step(other, row)]
    return f"{place} ({tag} after {before}{f', as in {word_list(others)}' if others else ''})"
