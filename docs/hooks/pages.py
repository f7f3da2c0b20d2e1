"""Pages of the site that are made when it is built: generated references and notebooks; links that lead out of docs/.

mkdocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import html
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def changelog() -> str:
    """Return CHANGELOG.md with links as seen from docs/."""
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")


def contributing() -> str:
    """Return CONTRIBUTING.md with links as seen from docs/."""
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")


def command_line() -> str:
    """Return the reference of the command line: every command with its arguments and options."""
    import typer

    from deltune.cli import app
    from deltune.cli.serve import serve_app
    from deltune.cli.train import train_app

    group: Any = typer.main.get_command(app.app)
    built = {"train": typer.main.get_command(train_app()), "serve": typer.main.get_command(serve_app())}
    commands = {**group.commands, **built}
    lines = [
        "# Command line",
        "",
        "This page is generated from the commands themselves. Results go to standard output and everything else to "
        "standard error; `--json` prints the result as JSON and nothing else. A mistake in what was typed ends with "
        "exit code 2, an interrupted training with 130.",
        "",
    ]
    for name, command in commands.items():
        for inner, leaf in getattr(command, "commands", {"": command}).items():
            lines += _command(f"{name} {inner}".rstrip(), leaf)
    return "\n".join(lines)


def configuration() -> str:
    """Return the reference of a run's configuration: every field by section."""
    from deltune.train.config import DOTTED, SECTIONS

    lines = [
        "# Configuration of a run",
        "",
        "This page is generated from the configuration itself. Every field has a place in the YAML file of a run "
        "(`section.field`), which `--set section.field=value` sets too, and an option of `deltune train`. "
        "`deltune train … --print-config` prints a run's whole configuration with its values. How these fields are "
        "used together is in [Train from the command line](../train/train.md).",
        "",
    ]
    return "\n".join([*lines, *_sections(SECTIONS, DOTTED)])


def serve_configuration() -> str:
    """Return the reference of a server's configuration: every field by section."""
    from deltune.serve.config import DOTTED, SECTIONS

    lines = [
        "# Configuration of a server",
        "",
        "This page is generated from the configuration itself. Every field has a place in the YAML file that `deltune "
        "serve --config` reads (`section.field`), which `--set section.field=value` sets too, and an option of "
        "`deltune serve`. `deltune serve MODEL --print-config` prints the whole configuration with its values. How "
        "these fields are used together is in [Serve](../serve/serve.md).",
        "",
    ]
    return "\n".join([*lines, *_sections(SECTIONS, DOTTED)])


def serve_requests() -> str:
    """Return the reference of a server's requests: every field of every path to which something is posted."""
    from pydantic import TypeAdapter

    from deltune.serve.api.schemas import INNER_BODIES, REQUESTS

    lines = [
        "# Requests of a server",
        "",
        "This page is generated from the schemas that `deltune serve` checks requests with. A body is a JSON object "
        "with these fields; `null` is the same as leaving a field out. A field that is not listed is refused. A path "
        "without `/v1` also exists below it: `/v1/classify` is `/classify`. [Serve](../serve/serve.md#ask-it) has a "
        "request and its answer for each path.",
        "",
    ]
    for path, kind in REQUESTS.items():
        lines += [f"## POST {path}", "", *_fields(TypeAdapter(kind).json_schema())]
    lines += ["## Objects", "", "What some of these fields hold.", ""]
    for kind in INNER_BODIES:
        lines += [f"### {kind.__name__}", "", *_fields(TypeAdapter(kind).json_schema())]
    return "\n".join(lines)


def _fields(schema: Mapping[str, Any]) -> list[str]:
    """Return what an object is and a table of its fields, from its JSON schema."""
    lines = [_text(schema["description"]), "", "| field | type | default | meaning |", "|---|---|---|---|"]
    required = schema.get("required", [])
    for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        meaning, default = re.fullmatch(r"(.*?)(?: \[([^\[\]]+)\])?", field["description"]).groups()
        default = "required" if name in required else default or "–"
        types = " or ".join(dict.fromkeys(_types(field))) or "null"
        lines.append(f"| `{name}` | {types} | {_text(default)} | {_text(meaning)} |")
    return [*lines, ""]


def _types(schema: Mapping[str, Any], plural: str = "") -> Iterator[str]:
    """Yield the types of JSON that a value may have, but null; in the plural where that is "s"."""
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _types(one, plural)
    elif "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield f"[{name}](#{name.lower()})"
    elif "enum" in schema or "const" in schema:
        yield from (f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    elif "type" not in schema:
        yield "anything"
    elif schema["type"] == "array":
        yield f"list{plural} of {' or '.join(_types(schema['items'], 's'))}"
    elif schema["type"] != "null":
        yield schema["type"] + plural


def _sections(sections: Mapping[str, Any], dotted: Mapping[str, str]) -> list[str]:
    """Return a table for each section of a configuration."""
    lines = []
    for section, kind in sections.items():
        lines += [f"## {section}", "", _text(kind.__doc__ or ""), "", "| field | option | default | meaning |"]
        lines += ["|---|---|---|---|"]
        for field, info in kind.model_fields.items():
            default = "required" if info.is_required() else _value(info.default)
            option = f"--{dotted[f'{section}.{field}'].replace('_', '-')}"
            lines.append(f"| `{section}.{field}` | `{option}` | {default} | {_text(info.description or '')} |")
        lines.append("")
    return lines


def studies() -> str:
    """Return the report of the papers' studies: tables, figures and findings of the results that are committed."""
    from deltune.cli.study import report
    from deltune.studies.jobs.store import exported_studies

    names = exported_studies(ROOT / "results")
    if not names:
        return "<!doctype html><title>Studies</title><p>No results of the papers' studies are committed yet.</p>"
    with tempfile.TemporaryDirectory() as folder:
        report(names, store=ROOT / "results", html=Path(folder) / "studies.html")
        return (Path(folder) / "studies.html").read_text(encoding="utf-8")


def _command(name: str, command: Any) -> list[str]:
    """Return the section of one command."""
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    options = [p for p in command.params if p.opts[0].startswith("-") and not p.hidden]
    names = [p.metavar or p.name.upper() for p in arguments]
    usage = " ".join(["deltune", name, *(["[OPTIONS]"] if options else []), *names])
    lines = [f"## deltune {name}", "", _text(command.help or ""), "", "```text", usage, "```", ""]
    if arguments:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{label}` | {_text(p.help or '')} |" for label, p in zip(names, arguments, strict=True)]
        lines.append("")
    panels = list(dict.fromkeys(p.rich_help_panel for p in options))
    for panel in panels:
        lines += [f"**{panel}**", ""] if panel else []
        lines += ["| option | meaning |", "|---|---|"]
        for option in (p for p in options if p.rich_help_panel == panel):
            value = "" if option.is_flag else f" {option.metavar or _kind(option)}"
            shown = option.show_default is not False and option.default not in (None, False, (), [])
            default = f" Default: {_value(option.default)}." if shown else ""
            label = f"{', '.join(option.opts)}{value}".replace("|", "\\|")
            lines.append(f"| `{label}` | {_text(option.help or '')}{default} |")
        lines.append("")
    if name == "train":
        lines += ["These are the common fields of a run's configuration; [Configuration](config.md) lists all.", ""]
    if name == "serve":
        lines += ["These are the common fields of a server's configuration; [its page](serve-config.md) lists all.", ""]
    return lines


def _kind(option: Any) -> str:
    """Return what is written for the value of an option."""
    annotation = str(option.type_descriptor.annotation)
    return next(
        (label for word, label in (("Path", "PATH"), ("int", "N"), ("float", "N")) if word in annotation), "TEXT"
    )


def _text(text: str) -> str:
    """Return a text for a cell of a table: no markup in it but code between backquotes."""
    parts = " ".join(text.split()).split("`")
    plain = [html.escape(part, quote=False).replace("*", r"\*").replace("[", r"\[") for part in parts[::2]]
    code = [f"`{part}`" for part in parts[1::2]]
    joined = "".join(a + b for a, b in zip(plain, [*code, ""], strict=True))
    return joined.replace("|", "\\|")


def _value(value: Any) -> str:
    """Return a default for a cell of a table."""
    if value in (None, (), {}):
        return "–"
    if isinstance(value, tuple):
        return f"`{', '.join(map(str, value))}`"
    return f"`{value}`"


def notebook(path: Path) -> str:
    """Return a notebook with its outputs as Markdown, with a link to the file below its first cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [text for cell in cells for text in _cell(cell)]
    texts.insert(1, f"This page is a notebook: [download it]({path.name}).")
    return "\n\n".join(texts) + "\n"


def _cell(cell: Mapping[str, Any]) -> Iterator[str]:
    """Yield a cell's source and its outputs; links to other notebooks become links to their pages."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield re.sub(r"\]\(([\w-]+)\.ipynb", r"](\1.md", source)
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
        if "image/png" in data:
            picture = data["image/png"].replace("\n", "")
            alt = html.escape(cell["metadata"]["alt"])
            size = output.get("metadata", {}).get("image/png", {})
            width = f' width="{size["width"]}"' if "width" in size else ""
            yield f'<p><img alt="{alt}"{width} src="data:image/png;base64,{picture}"></p>'
        elif "text/html" in data or "text/markdown" in data:
            yield data.get("text/html") or data["text/markdown"]
        else:
            text = "".join(output.get("text", "")) or data["text/plain"]
            yield f"```text\n{text.rstrip()}\n```"


GENERATED: dict[str, Callable[[], str]] = {
    "changelog.md": changelog,
    "contributing.md": contributing,
    "reference/cli.md": command_line,
    "reference/config.md": configuration,
    "reference/serve-config.md": serve_configuration,
    "reference/serve-requests.md": serve_requests,
    "studies.html": studies,
    **{
        f"notebooks/{path.stem}.md": partial(notebook, path)
        for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    },
}
"""Pages that are no files of docs/."""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files beside docs/ into links to the pages made from them and keep long lists out of the search.

    The names of a page of the reference are for readers of the repository.
    """
    markdown = re.sub(r"<!-- names -->\n.*?<!-- end -->\n\n", "", markdown, flags=re.DOTALL)
    if page.file.src_uri == "library/families.md":  # a row for each of 420 classes
        page.meta["search"] = {"exclude": True}
    markdown = re.sub(r"\]\(((?:\.\./)*notebooks/[\w-]+)\.ipynb", r"](\1.md", markdown)
    up = "../" * page.file.src_uri.count("/")
    for name in ("CHANGELOG", "CONTRIBUTING"):
        markdown = re.sub(rf"\]\((?:\.\./)+{name}\.md", f"]({up}{name.lower()}.md", markdown)
    return re.sub(r"\]\((?:\.\./)+README\.md", f"]({up}index.md", markdown)
