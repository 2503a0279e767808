"""An update that only some members take, on each platform."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dist_ens.ensemble.conditional_update import apply_update

pytestmark = pytest.mark.quick

OLD = {"w": jnp.ones((4, 3)), "key": jax.random.split(jax.random.key(0), 4)}
TAKES = jnp.array([True, False, True, True])


def halved(old, by):
    return {"w": old["w"] / by, "key": jax.random.fold_in(old["key"], 1)}


update = jax.vmap(partial(apply_update, halved), in_axes=(0, 0, None))


def test_the_others_keep_their_old_values():
    new = jax.jit(update)(TAKES, OLD, 2.0)
    np.testing.assert_array_equal(new["w"][:, 0], [0.5, 1, 0.5, 0.5])
    is_same = jax.random.key_data(new["key"]) == jax.random.key_data(OLD["key"])
    np.testing.assert_array_equal(is_same.all(axis=1), ~TAKES)


@pytest.mark.parametrize(("platform", "is_conditional"), [("cpu", True), ("cuda", False)])
@pytest.mark.parametrize("members", ["vmap", "map"])
def test_no_accelerator_waits_for_a_condition(members, platform, is_conditional):
    def by_map(takes, old, by):
        return jax.lax.map(lambda of_one: apply_update(halved, *of_one, by), (takes, old))

    program = jax.jit({"vmap": update, "map": by_map}[members])
    text = program.trace(TAKES, OLD, 2.0).lower(lowering_platforms=(platform,)).as_text()
    # The choice of the platform is two cases of a constant, which XLA removes.
    cases, loops = text.count("stablehlo.case") - 2, text.count("stablehlo.while")
    assert is_conditional == (cases + loops - (members == "map") > 0)
