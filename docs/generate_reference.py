"""Writes the reference of the config and of the command line from the code itself.

MkDocs runs this file. The tables are made of the docstrings and defaults of the dataclasses of a
config, and of the flags that each command defines.
"""

import dataclasses
import inspect
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping

import griffe
import mkdocs_gen_files

import launch
from dist_ens import models
from dist_ens.experiment import Experiment, model_options
from dist_ens.experiment.named import LOSSES, loss_options
from dist_ens.experiment.reading import OPTIONS


def descriptions(section: type) -> dict[str, str]:
    """Returns the description of each attribute, from the docstring of a dataclass."""
    (attributes,) = (
        part
        for part in griffe.Docstring(section.__doc__ or "", parser="google").parse()
        if part.kind is griffe.DocstringSectionKind.attributes
    )
    return {attribute.name: attribute.description for attribute in attributes.value}


def fields(section: type, prefix: str = "") -> Iterator[str]:
    """Yields a heading and a description for each field of a config, section after section."""
    texts, sections = descriptions(section), []
    for field in dataclasses.fields(section):
        # Options are fields of their own, with the names of a function's arguments.
        name = f"{prefix}{'ARGUMENT' if field.name == OPTIONS else field.name}"
        if isinstance(field.default_factory, type) and dataclasses.is_dataclass(
            field.default_factory
        ):
            sections.append((field, name))
            continue
        default = field.default
        if default is dataclasses.MISSING:
            default = field.default_factory()
        kind = re.sub(r"<class '(\w+)'>", r"\1", str(field.type))
        text = texts[field.name].replace("\n", "\n    ")  # the continuation of a definition
        note = "" if field.name == OPTIONS else f" ({kind}, default `{default!r}`)"
        yield f"`--config.{name}`{note}\n:   {text}\n\n"
    for field, name in sections:
        yield f"## {name}\n\n{texts[field.name]}\n\n"
        yield from fields(field.default_factory, f"{name}.")


def networks() -> Iterator[str]:
    """Yields a row for each network that a config can name, with its arguments."""
    yield "## Networks\n\n"
    yield "| `model.name` | what it is | arguments and defaults |\n| --- | --- | --- |\n"
    for name in models.__all__:
        what = (inspect.getdoc(getattr(models, name)) or "").partition("\n")[0]
        what = what.removeprefix("Returns ").rstrip(".")
        yield f"| `{name}` | {what} | {told(model_options(name))} |\n"
    yield (
        "\n`init` is `he_normal`, `fan_in_uniform` (as in PyTorch), or `normal` with the standard "
        "deviation `init_stddev`, which is None with the others.\n\n"
    )


def losses() -> Iterator[str]:
    """Yields a row for each loss that a config can name, with its arguments and the methods."""
    yield "## Losses\n\n"
    yield "| `loss.name` | arguments and methods, with their defaults |\n| --- | --- |\n"
    for name in LOSSES:
        yield f"| `{name}` | {told(loss_options(name))} |\n"
    yield "\n"


def told(options: Mapping[str, tuple[object, type]]) -> str:
    """Returns options with their defaults as a text."""
    return ", ".join(f"`{name}={default!r}`" for name, (default, _) in options.items()) or "none"


def flags_of(verb: str) -> Iterator[str]:
    """Yields the description of a command, and a row for each of its flags."""
    printed = subprocess.run(
        [sys.executable, "-m", f"launch.{verb}", "--helpxml"],
        capture_output=True,
        text=True,
        check=False,  # absl ends with 1 after it has printed its help
    ).stdout
    root = ElementTree.fromstring(printed)
    usage = root.findtext("usage", "").strip()
    yield f"## dist-ens {verb}\n\n```text\n{usage}\n```\n\n"
    yield "| flag | default | meaning |\n| --- | --- | --- |\n"
    for flag in root.iter("flag"):
        if "launch" in flag.findtext("file", ""):
            default, meaning = flag.findtext("default") or "", flag.findtext("meaning") or ""
            meaning = meaning.replace("|", "\\|").replace("<", "&lt;")
            shown = f"`{default}`" if default else ""
            yield f"| `--{flag.findtext('name')}` | {shown} | {meaning} |\n"
    yield "\n"


with mkdocs_gen_files.open("reference/config.md", "w") as page:
    page.write(
        "# Config\n\nEvery field of a config is a flag of `dist-ens train`. A tuple is quoted: "
        '`--config.data.mean="(0.5,0.5,0.5)"`.\n\n'
    )
    page.writelines(fields(Experiment))
    page.writelines(networks())
    page.writelines(losses())

with mkdocs_gen_files.open("reference/command_line.md", "w") as page:
    page.write("# Command line\n\n`dist-ens VERB` is `python -m launch.VERB`.\n\n")
    for verb in launch.VERBS:
        page.writelines(flags_of(verb))
