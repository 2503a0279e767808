"""A file is replaced as a whole, and nothing outside its folder is touched."""

import pytest

from dist_ens.ground.file_writing import replace_file, replaced_file

pytestmark = pytest.mark.quick


def test_a_link_under_the_unfinished_name_is_not_followed(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.write_text("precious")
    folder.mkdir()
    (folder / "summary.json.unfinished").symlink_to(outside)
    replace_file(folder / "summary.json", "{}")
    assert outside.read_text() == "precious"
    assert (folder / "summary.json").read_text() == "{}"
    assert [path.name for path in folder.iterdir()] == ["summary.json"]


def test_a_link_in_the_files_place_is_refused_and_its_target_stays(tmp_path):
    outside, path = tmp_path / "outside", tmp_path / "summary.json"
    outside.write_text("precious")
    path.symlink_to(outside)
    with pytest.raises(OSError, match="it is a symbolic link, through which nothing is written"):
        replace_file(path, "{}")
    assert (outside.read_text(), path.is_symlink()) == ("precious", True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["outside", "summary.json"]


def write_half_and_fail(path):
    with replaced_file(path) as file:
        file.write(b"half")
        raise LookupError


def test_an_error_leaves_the_old_content_and_no_other_file(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(LookupError):
        write_half_and_fail(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
