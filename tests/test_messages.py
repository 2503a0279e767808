"""Messages for a user, as a person reads them: `provocations` has a function for each."""

import re

import pytest

from provocations import Provocation, provocations, provoked

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


@each
def test_a_message_ends_as_a_sentence(provocation: Provocation):
    text = provoked(provocation).text
    assert text.endswith((".", "!", "?")), text
    assert "\n" not in text, text


@each
def test_a_message_has_no_slip(provocation: Provocation):
    text = provoked(provocation).text
    assert not {reason for pattern, reason in SLIPS.items() if re.search(pattern, text)}, text
