"""Text of YAML files."""

import re

import yaml

from dist_ens.errors import UserError
from dist_ens.json_text import Json, JsonDict
from dist_ens.paths import shortened

# Words that every YAML parser reads as text. PyYAML itself quotes the words of YAML, such as true.
_PLAIN = re.compile(r"(?:[A-Za-z/]|--[A-Za-z])[A-Za-z0-9_ ./=:@-]{2,}")


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes all text that another parser could read as a number or a bool.

    PyYAML writes `1e3` and `y` without quotes, because it reads them as text. The parser of
    Kubernetes reads a number and a bool.
    """

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(content: JsonDict) -> str:
    """Returns a YAML file, which a parser reads back as the same content.

    Args:
        content: Dicts, lists, texts, numbers, bools and None. The order of keys is kept.

    Raises:
        UserError: If a text is not valid Unicode.

    >>> print(yaml_text({"args": ["train", "1e3", "yes"]}), end="")
    args:
    - train
    - "1e3"
    - 'yes'
    """
    for text in _texts(content):
        if not text.isprintable():
            _check_unicode(text)
    # A width would break long lines, which some parsers join with other spaces.
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=float("inf"))


def _texts(content: Json) -> list[str]:
    """Returns all texts in a content."""
    if isinstance(content, dict):
        return [text for value in content.values() for text in _texts(value)]
    if isinstance(content, list):
        return [text for value in content for text in _texts(value)]
    return [content] if isinstance(content, str) else []


def _check_unicode(text: str) -> None:
    """Raises a `UserError` if a text has bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"The argument {shortened(text)} is not valid UTF-8, so a YAML file cannot hold it. "
            "Use another name."
        ) from error
