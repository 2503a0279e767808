"""Damage of a checkpoint: what a run does about it, and what `verify` says."""

import errno
import os
import random
import shutil
from functools import partial

import jax
import numpy as np
import pytest

from commands import dist_ens
from dist_ens.checkpoint import arrays, manifest, reading
from dist_ens.checkpoint.manifest import MANIFEST, Manifest
from dist_ens.checkpoint.verify import faults_of
from dist_ens.ground.errors import ExitCode, RunError
from dist_ens.layout import Layout
from dist_ens.storage import Disk
from launch import members
from saving import assert_same, begun, flip, rewrite, shapes_of, snapshot, steps_in, verified

STEPS = (100, 200)


def state_of(step):
    """A state of four members with other ids than their positions."""
    rng = np.random.default_rng(step)
    return Layout.make(4, devices=jax.devices()[:2]).put(
        {
            "w": rng.normal(size=(4, 400)).astype(np.float32),
            "b": rng.normal(size=(4, 3)).astype(np.float32),
            "step": np.full(4, step % 2**31, np.int32),
            "member_id": np.array([5, 1, 8, 2], np.int32),
        },
        "members",
    )


def save(folder, steps=STEPS):
    """Saves a run of several steps, each with another state and other bytes of its host."""
    with begun(folder) as opened:
        for step in steps:
            files = {"position": str(step).encode()}
            opened.save(snapshot(step, state_of(step), host_files=files))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    save(folder)
    return folder


@pytest.fixture
def run(sound, tmp_path):
    """A copy of a run with the steps 100 and 200."""
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


def step_folder(run, step):
    return run / "checkpoints" / str(step)


def step_place(run, step):
    return Disk(step_folder(run, step))


def files_in(folder):
    return Disk(folder).names()


def resumed(run, resume="same"):
    """Resumes a run as `fit` does.

    It returns the step, its state, the bytes of the host, and what was said.
    """
    said = []
    with begun(run, said.append, resume=resume) as opened:
        state = None
        while state is None:
            state = opened.restore_state(shapes_of(state_of(0)))
        position = opened.restore_host_file("position")
        return opened.saved_step, state, position, said + opened.notes


def assert_is_of(state, step):
    assert_same(state, state_of(step))


def flip_in(run, position):
    """Flips a bit of the leaf w of the member at a position in step 200."""
    values = np.asarray(state_of(200)["w"][position]).tobytes()
    for path in (step_folder(run, 200) / "state" / "d").iterdir():
        if (place := path.read_bytes().find(values)) >= 0:
            return flip(path, place)
    raise AssertionError("the values are in no file")


def bytes_of(folder):
    return {path: (folder / path).read_bytes() for path in files_in(folder)}


def test_a_flipped_bit_is_told_with_member_and_leaf_and_the_step_before_it_is_used(run):
    flip_in(run, 2)  # The member with the id 8.
    before = bytes_of(step_folder(run, 200))
    assert faults_of(step_place(run, 200))[0] == "leaf w of member 8 has changed"
    step, state, position, [said] = resumed(run)
    assert (step, position) == (100, b"100")
    assert_is_of(state, 100)
    kept = run / "checkpoints" / "200.damaged"
    assert said == (
        "The checkpoint of step 200 is damaged: leaf w has changed in the members [8]. It is kept "
        f"as {kept}. The run resumes from step 100."
    )
    assert bytes_of(kept) == before
    assert steps_in(run) == [100]
    assert resumed(run)[3] == []  # The next run has nothing more to say.


def test_the_command_verifies_all_steps_or_one_and_ends_with_44_where_one_is_damaged(run):
    flip_in(run, 2)
    ended = dist_ens("members", run, "verify")
    assert ended.returncode == ExitCode.DAMAGED, ended.stderr
    sound, damaged, member, file = ended.stdout.splitlines()
    assert (sound, damaged) == ("Step 100: sound.", "Step 200: damaged.")
    assert member == "  leaf w of member 8 has changed"
    assert file.startswith("  the file state/d/")
    assert verified(run, step=100) == (ExitCode.DONE, ["Step 100: sound."])


def test_every_damaged_step_is_kept_under_a_name_of_its_own(run):
    for _ in range(2):
        (step_folder(run, 200) / MANIFEST).write_bytes(b"")
        assert resumed(run)[0] == 100
        save(run, [200])
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"100", "200", "200.damaged", "200.damaged-2"}
    assert_is_of(resumed(run)[1], 200)


def test_strict_stops_at_damage_and_changes_nothing(run):
    flip_in(run, 0)
    told = r"200 is damaged: leaf w has changed in the members \[5\]\. Without --resume=strict"
    with pytest.raises(RunError, match=told) as stopped:
        resumed(run, resume="strict")
    assert stopped.value.exit_code == ExitCode.DAMAGED
    assert steps_in(run) == [100, 200]


def test_the_only_step_is_not_set_aside_and_no_run_begins_anew(run):
    shutil.rmtree(step_folder(run, 100))
    for damage in ("state/manifest.ocdbt", MANIFEST):
        (step_folder(run, 200) / damage).unlink()
        with pytest.raises(RunError, match="200 is damaged: .*to train anew") as stopped:
            resumed(run)
        assert stopped.value.exit_code == ExitCode.DAMAGED
        assert steps_in(run) == [200]


def copy_state(run):
    shutil.rmtree(step_folder(run, 200) / "state")
    shutil.copytree(step_folder(run, 100) / "state", step_folder(run, 200) / "state")


def copy_state_and_hashes(run):
    copy_state(run)
    older, newer = (step_folder(run, step) for step in STEPS)
    rewrite(newer, files=Manifest.read(Disk(older)).files)
    shutil.copytree(older / "host_files", newer / "host_files", dirs_exist_ok=True)


def declare(run, **change):
    leaves = Manifest.read(step_place(run, 200)).leaves
    rewrite(step_folder(run, 200), leaves=leaves | {"w": leaves["w"]._replace(**change)})


def rename(run):
    step_folder(run, 100).rename(step_folder(run, 300))


@pytest.mark.parametrize(
    ("damage", "older", "told"),
    [
        (copy_state, 100, "The checkpoint of step 200 is damaged: the file state/"),
        (copy_state_and_hashes, 100, "leaf b has changed in the members [5, 1]"),
        (partial(declare, shape=(4, 2**50)), 100, "the array of leaf w is not the one"),
        (partial(declare, crc32=(1, 2)), 100, "is damaged"),
        (rename, 200, "step 300 is damaged: its manifest.json is that of step 100"),
    ],
)
def test_what_does_not_belong_to_a_step_is_told(run, damage, older, told):
    damage(run)
    if damage is copy_state_and_hashes:
        told_by_verify = {f"leaf {leaf} of member 8 has changed" for leaf in ("w", "b", "step")}
        assert told_by_verify <= {*faults_of(step_place(run, 200))}
    step, state, _, [said] = resumed(run)
    assert step == older
    assert told in said
    assert_is_of(state, older)


def test_a_checkpoint_of_a_newer_format_is_refused_and_not_set_aside(run, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", 3)
    rewrite_as_new = Manifest.to_bytes(Manifest(200, {}, 1, {}, (), {}, {}))
    (step_folder(run, 200) / MANIFEST).write_bytes(rewrite_as_new)
    monkeypatch.undo()
    with pytest.raises(RunError, match="has the format 3, and this .* format 2") as refused:
        resumed(run)
    assert refused.value.exit_code != ExitCode.DAMAGED
    assert steps_in(run) == [100, 200]


def test_a_file_that_was_added_is_not_read_and_found_by_verify(run):
    (step_folder(run, 200) / "host_files" / "callbacks").write_bytes(b"\0" * 20)
    assert_is_of(resumed(run)[1], 200)
    [told] = faults_of(step_place(run, 200))
    assert told == "the file host_files/callbacks does not belong to it"
    with begun(run) as opened:
        assert opened.restore_host_file("callbacks") is None


@pytest.mark.parametrize(
    "part", ["state", "state/d", "state/_METADATA", "host_files", "host_files/position", MANIFEST]
)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_in_place_of_a_file_or_a_folder_is_damage(run, part, kind):
    place, moved = step_folder(run, 200) / part, run / "elsewhere"
    place.rename(moved)
    place.symlink_to(moved) if kind == "link" else os.mkfifo(place)
    code, told = verified(run)
    assert (code, "Step 200: damaged." in told) == (ExitCode.DAMAGED, True)
    step, _, _, [said] = resumed(run)  # It waits for no pipe.
    assert step == 100
    for sentences in (" ".join(told), said):
        assert "is no regular file" in sentences or "is missing" in sentences


@pytest.mark.parametrize(
    "name", ["0300", "+300", "\u0663\u0660\u0660", "300.damaged", "-1", "3e2", "9" * 19]
)
def test_a_folder_with_another_name_is_no_step(run, name):
    shutil.copytree(step_folder(run, 200), run / "checkpoints" / name)
    (run / "checkpoints" / "300").symlink_to(step_folder(run, 200))
    (run / "checkpoints" / "400").write_text("")
    assert resumed(run)[::3] == (200, [])
    assert (run / "checkpoints" / name).is_dir()


def test_steps_beyond_32_bits_are_saved_and_resumed(tmp_path):
    steps = (2**31 + 5, 2**40)
    save(tmp_path / "run", steps)
    assert resumed(tmp_path / "run")[::2] == (2**40, str(2**40).encode())


def make_raise(patch, module, name, error, times=1):
    """Patches a function, so that it raises an error the first times."""
    left, function = [error] * times, getattr(module, name)

    def patched(*args, **fields):
        if left:
            raise left.pop()
        return function(*args, **fields)

    patch.setattr(module, name, patched)


@pytest.mark.parametrize("code", ["ESTALE", "ETIMEDOUT", "ENOTCONN", "EHOSTDOWN", "EINTR"])
def test_a_disk_that_does_not_answer_is_no_damage(run, monkeypatch, code):
    number = getattr(errno, code)
    error = OSError(number, os.strerror(number))
    with monkeypatch.context() as patch:
        make_raise(patch, reading, "_compared", error)
        with pytest.raises(RunError, match="200 cannot be read: ") as stopped:
            resumed(run)
    assert stopped.value.exit_code == ExitCode.FAULT
    assert steps_in(run) == [100, 200]
    make_raise(monkeypatch, Disk, "digest", error)
    assert verified(run)[0] == ExitCode.FAULT


@pytest.mark.parametrize(("times", "step"), [(1, 200), (2, 100)])
@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (reading, "_compared", OSError(errno.EIO, "Input/output error")),
        # TensorStore reports the system's error as a text.
        (arrays, "member_digests", ValueError("UNKNOWN: Input/output error [OS error 5]")),
    ],
    ids=["files", "values"],
)
def test_an_input_output_error_is_damage_where_it_comes_twice(
    run, monkeypatch, times, step, module, name, error
):
    make_raise(monkeypatch, module, name, error, times)
    assert resumed(run)[0] == step


def test_a_step_that_a_run_replaces_is_not_called_damaged(run, monkeypatch):
    def replaced(checkpoint):
        shutil.rmtree(checkpoint.path)
        return faults_of(checkpoint)

    monkeypatch.setattr(members, "faults_of", replaced)
    code, told = verified(run)
    assert code == ExitCode.FAULT  # Nothing was verified.
    assert "Step 200: not verified. The checkpoint" in "\n".join(told)


# A fuzz over every kind of damage and every kind of file.


def _file(draw, run):
    folder = step_folder(run, draw.choice(STEPS))
    return folder / draw.choice(sorted(files_in(folder)))


def flip_a_bit(draw, run):
    path = _file(draw, run)
    flip(path, draw.randrange(path.stat().st_size), draw.randrange(8))


def truncate_a_file(draw, run):
    path = _file(draw, run)
    os.truncate(path, draw.randrange(path.stat().st_size))


def delete_a_file(draw, run):
    _file(draw, run).unlink()


def add_bytes(draw, run):
    with _file(draw, run).open("ab") as file:
        file.write(draw.randbytes(draw.randrange(1, 9)))


def add_a_file(draw, run):
    path = _file(draw, run)
    path.with_name(f"{path.name}{draw.choice(['.0', '.1', 'x'])}").write_bytes(path.read_bytes())


def delete_a_folder(draw, run):
    shutil.rmtree(_file(draw, run).parent)


def swap_a_file_between_steps(draw, run):
    """Swaps two files of one kind; those of the arrays have random names."""
    a, b = (sorted(files_in(step_folder(run, step))) for step in STEPS)
    place = draw.randrange(min(len(a), len(b)))
    first, second = step_folder(run, 100) / a[place], step_folder(run, 200) / b[place]
    first.rename(run / "aside")
    second.rename(first)
    (run / "aside").rename(second)


def copy_a_folder_to_another_step(draw, run):
    name = draw.choice(["state", "state/d", "host_files"])
    source, target = (step_folder(run, step) for step in draw.sample(STEPS, 2))
    shutil.rmtree(target / name)
    shutil.copytree(source / name, target / name)


def rename_a_step(draw, run):
    step_folder(run, draw.choice(STEPS)).rename(step_folder(run, draw.choice([1, 150, 300])))


def swap_two_steps(draw, run):
    step_folder(run, 100).rename(run / "aside")
    step_folder(run, 200).rename(step_folder(run, 100))
    (run / "aside").rename(step_folder(run, 200))


def edit_a_record(draw, run):
    path = step_folder(run, draw.choice(STEPS)) / MANIFEST
    old, new = draw.choice([(b'"seed": 0', b'"seed": 1'), (b'"step": ', b'"step": 1')])
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def drop_the_hash_of_a_record(draw, run):
    path = step_folder(run, draw.choice(STEPS)) / MANIFEST
    line = path.read_bytes().splitlines()[0]
    path.write_bytes(draw.choice([line, line + b"\n", line + b"\n{}\n"]))


DAMAGES = (
    *(flip_a_bit, truncate_a_file, delete_a_file, add_bytes, add_a_file, delete_a_folder),
    *(swap_a_file_between_steps, copy_a_folder_to_another_step, rename_a_step, swap_two_steps),
    *(edit_a_record, drop_the_hash_of_a_record),
)


def contents(run):
    """The bytes of each file of each step, by step and path."""
    folders = [path for path in (run / "checkpoints").iterdir() if path.name.isdecimal()]
    return {int(folder.name): bytes_of(folder) for folder in folders}


@pytest.mark.parametrize(
    "seed", [*range(24), *(pytest.param(n, marks=pytest.mark.faults) for n in range(24, 424))]
)
def test_damage_at_random_is_told_and_the_newest_sound_step_is_used(run, seed):
    draw = random.Random(seed)
    damage = DAMAGES[seed % len(DAMAGES)]
    before = contents(run)
    damage(draw, run)
    after = contents(run)
    is_sound = {step: files == before.get(step) for step, files in after.items()}
    assert is_sound == {step: not faults_of(step_place(run, step)) for step in after}
    if not any(is_sound.values()):
        with pytest.raises(RunError) as stopped:
            resumed(run)
        assert stopped.value.exit_code == ExitCode.DAMAGED
        return
    newest_sound = max(step for step, sound in is_sound.items() if sound)
    step, state, position, said = resumed(run)
    # A newer step may be used where only an added file changed it, which nobody reads.
    assert step >= newest_sound
    assert_is_of(state, step)
    assert position == str(step).encode()
    is_read = damage is not add_a_file
    assert said or step == max(is_sound) or not is_read, "the damage was passed over silently"
