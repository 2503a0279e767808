"""Paths that a person gives."""

import pathlib

import pytest

from dist_ens.ground.errors import UserError
from dist_ens.ground.paths import given_path, utf8_path

pytestmark = pytest.mark.quick


def test_a_tilde_is_the_home_folder_and_only_at_the_beginning(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert given_path("~/runs/x", "--workdir") == tmp_path / "runs/x"
    path = given_path("./~/x", "--workdir")
    assert given_path(path, "--workdir") == path == tmp_path / "~" / "x"


@pytest.mark.parametrize(
    "text", ["no/such/folder", "a:b/c", "C:/runs", "./gs:/run", "/runs/gs:/x", "runs//a"]
)
def test_a_path_need_not_exist_and_stays_as_it_is(text):
    assert given_path(text, "--workdir") == pathlib.Path(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("~nosuchuser/x", "cannot be used as a path"),
        ("a\0b", "cannot be used as a path"),
        ("a" * 256, "cannot be used as a path"),
        ("", "is empty. Give a path"),
        ("gs://bucket/run", "an address and not a local path"),
        ("file:///tmp/run", "an address and not a local path"),
        (pathlib.Path("az://b/run"), "an address and not a local path"),
    ],
)
def test_what_is_no_local_path_is_one_short_message(text, told):
    with pytest.raises(UserError, match=f"--workdir .*{told}") as caught:
        given_path(text, "--workdir")
    assert len(str(caught.value)) < 400
    assert "\0" not in str(caught.value)


def test_a_path_is_told_in_utf8_whatever_the_locale():
    # In ASCII, Python decodes the two bytes of the letter as two surrogates.
    assert utf8_path("runs \udcc3\udca4") == "runs \u00e4" == utf8_path("runs \u00e4")
    with pytest.raises(UserError, match=r"'runs/\\udcff' is not UTF-8, and no checkpoint can be"):
        utf8_path("runs/\udcff")
