"""Figures inside a page: SVG without what only a file needs, its names its own, or a PNG where that is smaller."""

from __future__ import annotations

import base64
import re
from typing import Any

from markupsafe import Markup

from .plots import Picture, rendered

LARGE = 100_000  # characters of SVG from which a PNG may be the smaller
READABLE = 0.75  # the least share of its own width a figure is shrunk to: letters of 7 points; below, its box scrolls


def inline(picture: Picture, prefix: str) -> dict[str, Any]:
    """What the page needs of a picture. prefix: of its ids, which are to be unlike those of other pictures."""
    width, height = (96 * inches for inches in picture.figure.get_size_inches())
    style = f"min-width:{READABLE * width:.0f}px;max-width:{1.25 * width:.0f}px"
    svg = _trimmed(picture.svg(), prefix)
    image = Markup('<svg {} style="{}"><title>{}</title>{}').format(_head(svg), style, picture.title, _body(svg))
    if len(svg) > LARGE:
        data = base64.b64encode(rendered(picture.figure, "png")).decode()
        if len(data) < len(svg):
            image = Markup(
                '<img src="data:image/png;base64,{}" alt="{}" style="{}" width="{:.0f}" height="{:.0f}">'
            ).format(data, picture.text, style, width, height)
    return {
        "title": picture.title,
        "text": picture.text,
        "notes": picture.notes,
        "image": image,
        "wide": width > 560,
    }


def _trimmed(svg: str, prefix: str) -> str:
    """One <svg> element as HTML takes it: no prolog, comments, metadata or name spaces; ids in use get the prefix."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", svg).replace("xlink:href", "href")
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", svg))
    svg = re.sub(r"\s+id=\"([^\"]*)\"", lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"\bhref=\"#", f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}")
    return re.sub(r">\s+<", "><", svg)


def _head(svg: str) -> Markup:
    """The view box, which alone is kept of the element's own attributes, and its role."""
    found = re.search(r'viewBox="([^"]*)"', svg)
    return Markup('viewBox="{}" role="img"').format(found.group(1) if found else "")


def _body(svg: str) -> Markup:
    """What stands inside the element: matplotlib's own marks, in which every word is escaped or drawn."""
    return Markup(svg[svg.index(">") + 1 :])
