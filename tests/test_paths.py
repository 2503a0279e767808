"""Paths that a person gives."""

import pathlib

import pytest

import dist_ens as de
from dist_ens.callbacks import JsonLines, Report
from dist_ens.errors import UserError
from dist_ens.experiment import DataConfig, open_source
from dist_ens.experiment.config_file import ConfigFile, ExperimentFile
from dist_ens.experiment.network_files import network_paths
from dist_ens.paths import given_path, shortened, utf8_path
from dist_ens.report import read_run

pytestmark = pytest.mark.quick


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert given_path("~/runs/x", "--workdir") == tmp_path / "runs/x"


def test_a_folder_that_is_named_like_a_home_can_be_given(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = given_path("./~/x", "--workdir")
    assert given_path(path, "--workdir") == path == tmp_path / "~" / "x"


def test_a_path_need_not_exist_and_stays_relative():
    assert given_path("no/such/folder", "--workdir") == pathlib.Path("no/such/folder")


def test_a_path_below_a_file_is_left_to_the_caller(tmp_path):
    (tmp_path / "file").touch()
    assert given_path(tmp_path / "file" / "x", "--workdir") == tmp_path / "file" / "x"


@pytest.mark.parametrize(
    "text", ["~nosuchuser/x", "a\0b", "a" * 256, "x/" * 3000], ids=["user", "null", "part", "whole"]
)
def test_what_the_system_refuses_is_one_short_message(text):
    with pytest.raises(UserError, match="--workdir cannot be used as a path") as caught:
        given_path(text, "--workdir")
    assert len(str(caught.value)) < 400
    assert "\0" not in str(caught.value)


def test_an_empty_path_is_not_the_current_folder():
    with pytest.raises(UserError, match="^--workdir is empty. Give a path"):
        given_path("", "--workdir")


@pytest.mark.parametrize(
    "text", ["gs://bucket/run", "S3://b", "file:///tmp/run", "htp://x", pathlib.Path("az://b/run")]
)
def test_an_address_is_no_local_path(text):
    with pytest.raises(UserError, match="^--workdir is '.*', an address and not a local path. Onl"):
        given_path(text, "--workdir")


@pytest.mark.parametrize("text", ["a:b/c", "C:/runs", "./gs:/run", "/runs/gs:/x", "runs//a"])
def test_a_name_with_a_colon_is_a_local_path(text):
    assert given_path(text, "--workdir") == pathlib.Path(text)


@pytest.mark.parametrize(
    "door",
    [
        de.Checkpoints,
        de.load,
        JsonLines,
        Report,
        read_run,
        ConfigFile,
        ExperimentFile,
        lambda path: network_paths([path]),
        lambda path: open_source(DataConfig(source=f"npz:{path}")),
        lambda path: open_source(DataConfig(source=f"idx:{path}")),
        lambda path: open_source(DataConfig(source=f"text:{path}")),
        lambda path: open_source(DataConfig(source=f"uci:{path}")),
    ],
)
def test_an_address_is_refused_wherever_python_takes_a_path(door):
    with pytest.raises(UserError, match="address and not a local path"):
        door("gs://bucket/x.npz")


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UserError, match="symbolic links"):
        given_path(tmp_path / "a" / "x", "--workdir")


def test_a_long_text_keeps_its_ends():
    assert shortened("a" * 300 + "z" * 300) == f"'{'a' * 100}'…'{'z' * 100}' (600 characters)"
    assert shortened("short\n") == r"'short\n'"


def test_a_path_is_told_in_utf8_whatever_the_locale():
    # In ASCII, Python decodes the two bytes of the letter as two surrogates.
    assert utf8_path("runs \udcc3\udca4") == "runs \u00e4" == utf8_path("runs \u00e4")
    with pytest.raises(UserError, match=r"'runs/\\udcff' is not UTF-8, and no checkpoint can be"):
        utf8_path("runs/\udcff")
