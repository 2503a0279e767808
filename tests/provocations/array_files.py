"""How the messages of `dist_ens.array_files` are provoked."""

import contextlib
import io
import os
import types
import zipfile

import numpy as np
import psutil

from dist_ens.array_files import npy, npz, opening, stored


def _npy_bytes(array=(1.0, 2.0)):
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=True)
    return file.getvalue()


def _read_npy(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    return npy.read_npy(tmp_path / "a.npy", "--input")


def _read_npz(tmp_path, key="inputs"):
    with npz.opened_npz(tmp_path / "a.npz", [key], "data.source") as arrays:
        return [array.read() for array in arrays]


def _write_npz(tmp_path):
    np.savez(tmp_path / "a.npz", inputs=np.zeros(2))


def _stored(shape=(2,), dtype=np.float32, body=b""):
    opened = contextlib.nullcontext(io.BytesIO(body))
    return stored.StoredArray("a.npy", shape, np.dtype(dtype), lambda: opened)


def text_instead_of_an_array(tmp_path):
    _read_npy(tmp_path, b"1.0, 2.0")


def a_header_that_is_cut_off(tmp_path):
    _read_npy(tmp_path, _npy_bytes()[:9])


def a_header_that_is_too_long(tmp_path):
    _read_npy(tmp_path, _npy_bytes()[:8] + b"\xff\xff")


def an_array_that_is_cut_off(tmp_path):
    _read_npy(tmp_path, _npy_bytes()[:-4])


def an_array_of_records(tmp_path):
    _read_npy(tmp_path, _npy_bytes(np.zeros(2, [("x", "f4")])))


def an_archive_without_the_array(tmp_path):
    _write_npz(tmp_path)
    _read_npz(tmp_path, key="labels")


def an_archive_with_an_array_twice(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("inputs.npy", _npy_bytes())
        archive.writestr("inputs", _npy_bytes())
    _read_npz(tmp_path)


def _changed_entry(tmp_path, monkeypatch, **changes):
    """Reads an archive whose only entry says something else of itself."""
    _write_npz(tmp_path)
    infolist = zipfile.ZipFile.infolist

    def changed(archive):
        for entry in infolist(archive):
            for name, value in changes.items():
                setattr(entry, name, value)
        return infolist(archive)

    monkeypatch.setattr(zipfile.ZipFile, "infolist", changed)
    _read_npz(tmp_path)


def an_encrypted_archive(tmp_path, monkeypatch):
    _changed_entry(tmp_path, monkeypatch, flag_bits=1)


def an_archive_packed_by_another_method(tmp_path, monkeypatch):
    _changed_entry(tmp_path, monkeypatch, compress_type=zipfile.ZIP_LZMA)


def an_archive_that_declares_more_than_it_can_hold(tmp_path, monkeypatch):
    _changed_entry(tmp_path, monkeypatch, file_size=10**12)


def a_file_that_is_absent(tmp_path):
    npy.read_npy(tmp_path / "a.npy", "--input")


def a_folder_instead_of_a_file(tmp_path):
    npy.read_npy(tmp_path, "--input")


def a_pipe_instead_of_a_file(tmp_path):
    os.mkfifo(tmp_path / "a.npy")
    npy.read_npy(tmp_path / "a.npy", "--input")


def data_larger_than_the_memory(monkeypatch):
    memory = types.SimpleNamespace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    opening.require_memory(2**31, "The file a.txt")


def an_array_of_too_many_axes():
    _stored(shape=(1,) * 65)


def an_array_of_too_large_a_shape():
    _stored(shape=(2**40, 2**40))


def an_array_of_objects():
    _stored(dtype=object).read()


def an_array_of_text():
    _stored(dtype="<U3").read()


def an_array_for_which_the_system_gives_no_memory(monkeypatch):
    def refused(*_):
        raise MemoryError

    monkeypatch.setattr(np, "empty", refused)
    _stored().read()


def a_body_that_is_too_short():
    _stored(body=b"1234").read()


def a_body_that_is_too_long():
    _stored(body=b"123456789").read()


def an_archive_that_is_damaged(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04")
    _read_npz(tmp_path)


def a_compressed_file_that_ends_too_early():
    with stored.damage_told("train-images-idx3-ubyte.gz"):
        raise EOFError
