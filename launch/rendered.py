"""Files for cluster managers, which are filled from `templates/`."""

import sys
from collections.abc import Iterable, Mapping

import jinja2
import yaml
from absl import flags

from dist_ens.ground.commands import quoted
from launch import cli


def _yaml(value: object) -> str:
    """Returns a text, or a dict of texts, in the double quotes of YAML, on one line."""
    return yaml.safe_dump(
        value,
        default_style='"',
        default_flow_style=True,
        allow_unicode=True,
        sort_keys=False,
        width=float("inf"),
    ).rstrip("\n")


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("launch"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"sh": quoted, "yaml": _yaml}


def filled(template: str, options: Mapping[str, object], **others: object) -> str:
    """Returns a file of `templates/` with the values of options, and others."""
    return _ENVIRONMENT.get_template(template).render({**options, **others})


def deliver(
    text: str, output: flags.FlagHolder, next_commands: Iterable[str], *, dry_run: bool
) -> None:
    """Writes a file, or prints it without `output` and in a dry run, and prints what comes next.

    The next commands are on standard error, so that a pipe gets the file alone.
    """
    if output.value is None or dry_run:
        print(text, end="")
    else:
        cli.check_outputs(output)
        cli.write_file(output, text)
    print("Next:", *(f"  {line}" for line in next_commands), sep="\n", file=sys.stderr)
