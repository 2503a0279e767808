"""Folders of runs on a disk and in buckets: what is written is read, and writers are told apart."""

import os
import pathlib
import subprocess
import sys

import pytest

from conftest import ROOT
from dist_ens.ground.causes import explained, is_of_disk
from dist_ens.ground.errors import UserError
from dist_ens.storage import ABSENT, Bucket, Disk, place_of
from object_servers import s3_server

WAYS = ["disk", "memory", pytest.param("s3", marks=pytest.mark.servers)]


@pytest.fixture(scope="module")
def server():
    with s3_server() as started:
        yield started


@pytest.fixture(params=WAYS)
def place(request, tmp_path):
    if request.param == "disk":
        return Disk(tmp_path)
    if request.param == "memory":
        return Bucket("memory", {"driver": "memory", "path": f"{tmp_path.name}/"})
    server = request.getfixturevalue("server")
    return server.bucket() / "runs" / "a"


def test_files_are_written_listed_read_and_deleted(place):
    part = place / "part"
    place.write("top", b"0")
    part.write("x", b"1")
    part.write("deep/y", b"\0" * 5000)
    part.write("x", b"2")
    assert sorted(place.names()) == ["part/deep/y", "part/x", "top"]
    assert sorted(part.names("deep")) == ["deep/y"]
    assert part.names("absent") == (place / "absent").names() == []
    assert part.read("x") == b"2"
    assert part.size("x") in (1, None)
    part.remove("x")
    part.remove("x")
    with pytest.raises(FileNotFoundError):
        part.read("x")
    part.move_to(place / "moved")
    assert sorted(place.names()) == ["moved/deep/y", "top"]
    (place / "moved").remove_all()
    (place / "moved").remove_all()
    assert place.names() == ["top"]


def test_of_two_writers_of_a_file_one_wins(place):
    assert place.write_if("lock", b"a", ABSENT)
    assert not place.write_if("lock", b"b", ABSENT)
    content, tag = place.read_tagged("lock")
    assert content == b"a"
    assert place.write_if("lock", b"c", tag)
    assert not place.write_if("lock", b"d", tag)
    assert place.read("lock") == b"c"
    place.remove("lock")
    assert place.read_tagged("lock") == (b"", ABSENT)
    assert not place.write_if("lock", b"d", tag)


def test_a_folder_of_a_disk_is_made_below_its_root_alone_and_no_link_is_followed(tmp_path):
    gone = Disk(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        (gone / "checkpoints").write("x", b"")
    assert not (tmp_path / "gone").exists()
    (tmp_path / "run" / "real").mkdir(parents=True)
    (tmp_path / "run" / "real" / "x").touch()
    (tmp_path / "run" / "link").symlink_to("real")
    run = Disk(tmp_path / "run")
    assert sorted(run.names()) == ["link", "real/x"]
    (run / "link").remove_all()
    assert sorted(run.names()) == ["link", "real/x"]
    for name in ("link", "real"):
        with pytest.raises(OSError, match="no regular file"):
            run.size(name)
    os.mkfifo(tmp_path / "run" / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        run.read("pipe")


@pytest.mark.parametrize(
    "text",
    [
        *("az://box/a", "http://x.org/a", "gcs://box/a", "file:///tmp/a", "s3:/box/a"),
        *("gs://box", "gs://box/", "s3://bo/a", "s3://box/a/../b", "s3://box//a", "s3://BOX/a"),
        pathlib.Path("s3://box/a"),
    ],
)
def test_an_address_that_cannot_be_used_is_told_with_those_that_can(text):
    with pytest.raises(UserError, match="^--workdir is .*gs://BUCKET/PATH, s3://BUCKET/PATH, or"):
        place_of(text, "--workdir")


def test_only_the_room_of_storage_opens_files_of_a_run(tmp_path):
    command = [sys.executable, "tests/opened_by.py", str(tmp_path / "run")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1:] == ["storage"], ended.stdout
    assert len([line for line in ended.stdout.splitlines() if str(tmp_path) in line]) == 0


def test_addresses_name_folders_of_buckets(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1/")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    place = place_of("s3://my-bucket/runs/a/", "folder") / "checkpoints"
    assert str(place) == "s3://my-bucket/runs/a/checkpoints"
    assert place.spec() == {
        "driver": "s3",
        "bucket": "my-bucket",
        "path": "runs/a/checkpoints/",
        "endpoint": "http://127.0.0.1:1",
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
    }
    assert place_of("gs://my-bucket/a", "folder").spec() == {
        "driver": "gcs",
        "bucket": "my-bucket",
        "path": "a/",
    }
    assert isinstance(place_of("runs/a", "folder"), Disk)


@pytest.mark.parametrize(
    ("told", "what", "remedy"),
    [
        (
            'UNAVAILABLE: Error reading "a/b": CURL error [curl_code=7] [x=1]',
            "CURL error",
            "Check the connection to the server",
        ),
        (
            "INVALID_ARGUMENT: ExpiredToken: expired [http_response_code='400']",
            "ExpiredToken: expired",
            "Set or renew the credentials, or give them the right to read and write there",
        ),
    ],
)
def test_an_error_of_a_server_is_no_damage_and_is_told_in_words(told, what, remedy):
    assert is_of_disk(ValueError(told))
    assert explained(ValueError(told))[:2] == (what, remedy)


@pytest.mark.servers
def test_a_bucket_that_does_not_exist_is_told_in_words(server):
    place = server.bucket("no-such-bucket") / "a"
    for use in (lambda: place.write("x", b""), place.names):
        with pytest.raises(OSError, match="bucket does not exist.*s3://no-such-bucket/a"):
            use()
