"""Every message for a user, in one file to read: as the code writes it, and as a person reads it.

`provocations` has a function for each message. After a change of a message, write the file anew and
review the difference:

    python tests/test_messages.py
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "messages.txt"
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import conftest  # noqa: F401  # The command has the devices that the tests have.

import pytest  # noqa: E402

from provocations import Provocation, Site, provocations, provoked, sites  # noqa: E402

# What no message has, with the reason.
SLIPS = {
    r"\{[A-Za-z_][\w.]*[}(\[!:]": "an expression that is not formatted",
    r"<function|<lambda>|<class|<module| object at |0x[0-9a-f]{5}": "the repr of an object",
    r"PyTreeDef|ShapeDtypeStruct|DictKey|ArrayImpl|Tracer\b|:f32\[": "a name of JAX's own",
    r"Received:": "what was given is told with its field",
    r"\b[Aa] (?=[aeio])(?!one\b)": "an before a vowel",
    r"\ban (?=[bcdgjkpqtvwyz])": "a before a consonant",
    r"(?<![\w.,(\[=/-])1 (?!(is|was|has|axis|class|times)\b)[a-z]+s\b": "a plural of one",
    r"\w\(s\)": "a plural in parentheses",
    r"  ": "two spaces",
    r"(?<![.'/])\.\.(?![./])|(?<=[\w\])])[.!?]['\")]+[.!?]": "two ends of a sentence",
    r"…\.?$": "an end that leaves something out",
}

pytestmark = pytest.mark.quick
each = pytest.mark.parametrize("provocation", provocations(), ids=lambda each: each.name)


def written() -> str:
    """Returns the file: each message below the file that writes it, with what was provoked."""
    texts: dict[Site, set[str]] = {site: set() for site in sites()}
    for provocation in provocations():
        message = provoked(provocation)
        texts[message.site].add(message.text)
    lines = []
    for file in sorted({site.file for site in texts}):
        lines += [f"== {file}", ""]
        for site in sorted(site for site in texts if site.file == file):
            lines += [site.template, *(f"    {text}" for text in sorted(texts[site])), ""]
    return "\n".join(lines)


@each
def test_a_message_reads_as_in_the_file(provocation: Provocation):
    message = provoked(provocation)
    is_in_file = f"    {message.text}" in GOLDEN.read_text().splitlines()
    assert is_in_file, (
        f"{message.site.file} says: {message.text}\n"
        "If that reads well: python tests/test_messages.py writes the file anew."
    )


def test_the_file_has_every_message_and_no_other():
    assert written() == GOLDEN.read_text(), "python tests/test_messages.py writes the file anew"


def test_every_message_is_provoked():
    missing = {*sites()} - {provoked(provocation).site for provocation in provocations()}
    listed = [f"{site.file}:{sites()[site][0]}: {site.template}" for site in sorted(missing)]
    assert not missing, "\n".join(["Add to tests/provocations what provokes:", *listed])


@each
def test_a_message_ends_as_a_sentence(provocation: Provocation):
    text = provoked(provocation).text
    assert text.endswith((".", "!", "?")), text
    assert "\n" not in text, text


@each
def test_a_message_has_no_slip(provocation: Provocation):
    text = provoked(provocation).text
    assert not {reason for pattern, reason in SLIPS.items() if re.search(pattern, text)}, text


if __name__ == "__main__":
    GOLDEN.write_text(written())
