"""Every message of an error that is raised for what a user gave, in one file to read.

After a change of a message, write the file anew and review the difference:

    python tests/test_messages.py
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = pathlib.Path(__file__).parent / "messages.txt"
# Functions whose argument at a position is a message.
RAISING = {"UserError": 0, "RunError": 0, "require": 1}

pytestmark = pytest.mark.quick


def text_of(node):
    """Returns a message with its values as `{expression}`; other expressions as they stand."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values))
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
    return f"{{{ast.unparse(node)}}}"


def messages():
    """Returns the messages, each below the file that raises it."""
    for folder in ("dist_ens", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found = [
                text_of(node.args[RAISING[node.func.id]])
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in RAISING
                and len(node.args) > RAISING[node.func.id]
            ]
            if found:
                yield f"== {path.relative_to(ROOT)}", sorted(found)


def written():
    return "".join(f"{file}\n\n" + "\n".join(texts) + "\n\n" for file, texts in messages())


def test_every_message_is_in_the_file_to_read():
    assert written() == GOLDEN.read_text(), "python tests/test_messages.py writes the file anew"


def test_no_message_says_received():
    for file, texts in messages():
        for text in texts:
            assert "Received:" not in text, f"{file}: {text}"


def test_every_message_ends_as_a_sentence():
    for file, texts in messages():
        for text in texts:
            assert text[-1] in ".!?}", f"{file}: {text}"


if __name__ == "__main__":
    GOLDEN.write_text(written())
