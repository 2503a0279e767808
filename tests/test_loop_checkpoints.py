"""`Checkpoints.save` and `restore`: the members of a loop of your own on disk."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from dist_ens.ground.errors import UserError
from saving import flip

OPTIMIZER = optax.adam(0.1)
LAYOUT = de.Layout.make(4, devices=jax.devices()[:4])


def init(key):
    params = {"w": jax.random.normal(key, (3,))}
    return {"params": params, "opt": OPTIMIZER.init(params), "key": key, "seen": jnp.int8(0)}


def step(member, x):
    key, noise = jax.random.split(member["key"])
    grads = {"w": member["params"]["w"] - x.mean(axis=0) + jax.random.normal(noise, (3,))}
    updates, opt = OPTIMIZER.update(grads, member["opt"])
    params = optax.apply_updates(member["params"], updates)
    return {"params": params, "opt": opt, "key": key, "seen": member["seen"] + 1}


def trained(members, layout, steps):
    lifted = de.lift(step, layout=layout, in_specs=("members", "shared"), execution="loop")
    for number in steps:
        members = lifted(members, np.full((4, 3), number, np.float32))
    return members


def bits(members):
    leaves = jax.tree.leaves(members | {"key": jax.random.key_data(members["key"])})
    return [np.asarray(leaf).tobytes() for leaf in leaves]


@pytest.mark.parametrize("columns", [1, 2])
def test_a_loop_of_ones_own_resumes_on_another_layout_with_its_bits(tmp_path, columns):
    other = de.Layout.make(4, ensemble_axis=2, devices=jax.devices()[: 2 * columns])
    members = LAYOUT.init(init, jax.random.key(0))
    checkpoints = de.Checkpoints(tmp_path)
    assert checkpoints.restore(LAYOUT, members) == (0, members)
    members = trained(members, LAYOUT, range(3))
    checkpoints.save(3, members)
    # The shapes are enough, and the members come back on the other mesh.
    number, restored = de.Checkpoints(tmp_path).restore(other, jax.eval_shape(lambda: members))
    assert number == 3
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(restored)} == {other.mesh}
    assert jax.tree.structure(restored) == jax.tree.structure(members)
    assert bits(restored) == bits(members)
    assert bits(trained(restored, other, [3, 4])) == bits(trained(members, LAYOUT, [3, 4]))


def test_a_damaged_checkpoint_of_a_loop_is_set_aside_for_the_one_before(tmp_path):
    members = LAYOUT.init(init, jax.random.key(0))
    later = trained(members, LAYOUT, range(2))
    de.Checkpoints(tmp_path).save(1, members)
    de.Checkpoints(tmp_path).save(2, later)
    files = [path for path in (tmp_path / "checkpoints/2").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size // 2)
    number, restored = de.Checkpoints(tmp_path).restore(LAYOUT, members)
    assert (number, bits(restored)) == (1, bits(members))


def test_what_a_folder_holds_is_not_mixed_with_something_else(tmp_path):
    members = LAYOUT.init(init, jax.random.key(0))
    loop, run = (de.Checkpoints(tmp_path / name) for name in ("loop", "run"))
    loop.save(5, members)
    with pytest.raises(UserError, match="holds step 5 already, and step 5 is not after it. Begin"):
        loop.save(5, members)  # A loop that began anew would be kept as the older one.
    with pytest.raises(UserError, match=r"each leaf must be a JAX array \[members, ...\]"):
        loop.save(6, members | {"seen": np.zeros(4)})

    ensemble = de.Ensemble.from_step(
        init=lambda key, batch: {"w": jnp.zeros(3)},
        step=lambda state, batch, key: (state, {}),
        num_members=8,
    )
    data = np.ones((8, 3), np.float32)
    with pytest.raises(UserError, match="holds members of a loop of your own"):
        de.fit(ensemble, data, steps=1, checkpoints=loop, progress=False)
    de.fit(ensemble, data, steps=1, checkpoints=run, progress=False)
    with pytest.raises(UserError, match="holds a run of fit. Choose another folder"):
        run.restore(LAYOUT, members)
