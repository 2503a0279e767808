"""The mesh, and who feeds which part of a batch."""

import jax
import numpy as np
import pytest

from dist_ens.ground.errors import UserError
from dist_ens.layout import (
    BATCH,
    BATCHES,
    MEMBER_BATCH,
    MEMBERS,
    Layout,
    copied,
    global_shapes,
    read_onto_devices,
)
from dist_ens.layout.placing import check_lengths

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("num_members", "devices", "mesh"),
    [
        (8, 8, (8, 1)),
        (10, 8, (2, 4)),  # gcd(10, 8) = 2; no device idle
        (4, 8, (4, 2)),
        (3, 8, (1, 8)),
        (16, 8, (8, 1)),
        (5, 1, (1, 1)),
        (9, 6, (3, 2)),
    ],
)
def test_the_ensemble_axis_is_the_largest_that_divides_both(num_members, devices, mesh):
    layout = Layout.make(num_members, devices=jax.devices()[:devices])
    assert (layout.ensemble_axis, layout.data_axis) == mesh
    assert layout.members_per_device * layout.ensemble_axis == num_members
    assert layout.mesh.axis_names == ("ensemble", "data")
    assert layout.mesh.devices.ravel().tolist() == jax.devices()[:devices]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Layout.make(10, ensemble_axis=4), "got ensemble_axis=4 for 8 devices and num_mem"),
        (lambda: Layout.make(16, ensemble_axis=16), "Use ensemble_axis=1 or 2 or 4 or 8"),
        (lambda: Layout.make(4).check_batch_size("size", 7), "size=7 and a data axis of 2.*Use a"),
        (
            lambda: Layout.make(4).put({"y": np.zeros((1, 8)), "x": np.zeros((1, 7))}, BATCHES),
            r"Leaf \['x'\] of the batch has the shape \[1, 7\], and its axis 1 is divided over 2",
        ),
        (
            lambda: Layout.make(4).put({"x": np.zeros((3, 2))}, "member_batch"),
            r"^The array\['x'\] has the shape \[3, 2\], and its axis 0 should hold 4 members",
        ),
    ],
)
def test_what_does_not_divide_is_refused(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


@pytest.mark.parametrize("mesh", [(1, 8), (2, 4), (8, 1)], ids=str)
def test_a_batch_arrives_whole_and_in_order(mesh):
    layout = Layout.make(8, ensemble_axis=mesh[0])
    batch = np.arange(3 * 16 * 2).reshape(3, 16, 2)
    rows = layout.host_rows(16)
    assert rows.tolist() == list(range(16))
    placed = layout.put({"x": batch[:, rows]}, BATCHES)["x"]
    np.testing.assert_array_equal(placed, batch)
    assert {s.data.shape for s in placed.addressable_shards} == {(3, 16 // mesh[1], 2)}
    np.testing.assert_array_equal(layout.put(batch[0], BATCH), batch[0])


def test_a_copy_lies_where_the_first_does_and_outlives_it():
    layout = Layout.make(8, ensemble_axis=4)
    keys = jax.random.split(jax.random.key(0), 8)
    first = layout.put({"w": np.arange(8.0), "key": keys}, "members")
    copy = copied(first)
    assert [leaf.sharding for leaf in jax.tree.leaves(copy)] == [layout.sharding(MEMBERS)] * 2
    first["w"].delete()
    assert copy["w"].tolist() == list(range(8))


def test_a_host_gives_its_own_members_of_a_batch_and_all_members_of_a_state():
    layout = Layout.make(8, ensemble_axis=4)  # 4 x 2, two members on each row
    layout.__dict__["host_mesh_rows"] = (2, 3)  # as on the second of two hosts
    of_host, of_all = np.zeros((4, 2)), np.zeros((8, 2))
    check_lengths(layout, of_host, MEMBER_BATCH, "x")
    check_lengths(layout, of_all, MEMBERS, "x")
    check_lengths(layout, jax.numpy.asarray(of_all), MEMBER_BATCH, "x")
    with pytest.raises(UserError, match="axis 0 should hold 4 members"):
        check_lengths(layout, of_all, MEMBER_BATCH, "x")
    with pytest.raises(UserError, match=r"axis 0 should hold 8 members\."):
        check_lengths(layout, of_host, MEMBERS, "x")


def test_what_is_read_waits_for_memory_and_each_part_is_read_once(monkeypatch):
    layout = Layout.make(4, ensemble_axis=2, devices=jax.devices()[:4])
    whole = {name: np.full((4, 256), i, np.float32) for i, name in enumerate("abcd")}
    begun, ended, most = [], [], []

    class Read:
        def __init__(self, name, index):
            self.part = whole[name][index]
            begun.append(self.part.nbytes)
            most.append(sum(begun) - sum(ended))

        def result(self):
            return self.part

    put = jax.make_array_from_callback

    def put_and_count(*args, **kwargs):
        array = put(*args, **kwargs)
        ended.append(array.nbytes)
        return array

    monkeypatch.setattr(jax, "make_array_from_callback", put_and_count)
    monkeypatch.setattr("dist_ens.layout.offload._READ_AT_ONCE_BYTES", 8192)
    abstract = jax.ShapeDtypeStruct((4, 256), np.float32, sharding=layout.sharding(MEMBERS))
    read = read_onto_devices(dict.fromkeys(whole, abstract), Read)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(read), whole)
    # Two rows of two devices each: two parts of 2 KiB of an array, and two arrays at once.
    assert (begun, max(most)) == ([2048] * 8, 8192)


@pytest.mark.parametrize("spec", ["batch", "shared", "members"])
def test_a_number_that_does_not_fit_in_32_bits_is_refused_and_not_wrapped(spec):
    layout = Layout.make(2, devices=jax.devices()[:2])

    def put(array):
        return layout.put({"x": array}, spec)["x"]

    for dtype, most, held in (("int64", 2**31 - 1, "int32"), ("uint64", 2**32 - 1, "uint32")):
        fits = put(np.array([0, most], dtype))
        assert (fits.dtype, fits.tolist()) == (held, [0, most])
        with pytest.raises(UserError, match=rf"Leaf \['x'\]: the value {most + 1} at index 1"):
            put(np.array([0, most + 1], dtype))
    assert put(np.array([0.5, 2.0])).tolist() == [0.5, 2.0]
    with pytest.raises(UserError, match=r"the value 1e\+300 at index 1 does not fit in float32"):
        put(np.array([0.5, 1e300]))


def test_the_global_batch_of_hosts_that_feed_two_of_three_columns():
    # Three hosts with two devices each feed the columns (0, 1), (2, 0) and (1, 2) of a 2 x 3 mesh.
    layout = Layout.make(2, ensemble_axis=2, devices=jax.devices()[:6])
    layout.__dict__["host_columns"] = (0, 1)
    of_host = {"x": jax.ShapeDtypeStruct((8, 5), "float32")}
    assert global_shapes(layout, of_host, BATCH)["x"].shape == (12, 5)


@pytest.mark.parametrize("spec", ["members", "batch", "member_batch", "shared"])
def test_an_array_may_be_changed_after_it_was_put(spec):
    layout = Layout.make(4, ensemble_axis=2, devices=jax.devices()[:4])
    for _ in range(10):  # Whether memory is shared depends on its address.
        array = np.zeros((4, 4096), np.float32)
        there = jax.block_until_ready(layout.put(array, spec))
        array[:] = 1
        assert not np.asarray(there).any()
