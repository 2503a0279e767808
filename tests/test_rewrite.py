"""A rewritten function does what it did, whatever encloses the operations that have a rule."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dist_ens.execution.lowerings import PRODUCT
from dist_ens.execution.rewrite import contains, rewritten

pytestmark = pytest.mark.quick

X = np.eye(3, dtype=np.float32) * 2 + np.arange(9, dtype=np.float32).reshape(3, 3) / 20
ZERO, ONE = np.float32(0), np.float32(1)


def as_sum(lhs, rhs, *, dimension_numbers, **_):
    """A matrix product, or several that are batched, without the operation for it."""
    summed, batches = dimension_numbers

    def rows_of(array, summed, batch):
        """The array as [batch, rows, summed], and the sizes of its batch and rows."""
        rows = [axis for axis in range(array.ndim) if axis not in (*summed, *batch)]
        parts = [[array.shape[axis] for axis in axes] for axes in (batch, rows, summed)]
        array = array.transpose(*batch, *rows, *summed)
        return array.reshape([math.prod(sizes) for sizes in parts]), parts[:2]

    (left, (batch, rows)), (right, (_, columns)) = map(rows_of, (lhs, rhs), summed, batches)
    product = (left[:, :, None] * right[:, None]).sum(axis=-1)
    return product.reshape(*batch, *rows, *columns)


RULES = {PRODUCT: as_sum}


@jax.custom_jvp
def squared(x):
    return x @ x


squared.defjvp(lambda xs, ts: (xs[0] @ xs[0], ts[0] @ xs[0] + xs[0] @ ts[0]))


@jax.custom_vjp
def cubed(x):
    return x @ x @ x


cubed.defvjp(lambda x: (x @ x @ x, x), lambda x, g: (g @ x.T @ x.T,))


@jax.custom_batching.custom_vmap
def doubled(x):
    return x @ (x + x)


@doubled.def_vmap
def _(axis_size, in_batched, xs):
    return xs @ (xs + xs), True


def in_a_reference(x):
    total = jax.new_ref(jnp.zeros_like(x))

    def add(number, _):
        total[...] += x @ x
        return number

    lax.fori_loop(0, 2, add, 0)
    return total[...] @ x


# By the operation that encloses a product: a function of one matrix.
DIFFERENTIABLE = {
    "custom_linear_solve": lambda x: jnp.linalg.solve(x, x @ x),
    "expm": jax.scipy.linalg.expm,
    "conjugate gradients": lambda x: jax.scipy.sparse.linalg.cg(lambda y: x @ x.T @ y, x[0])[0],
    "custom_root": lambda x: lax.custom_root(
        lambda y: y @ x - x,
        x @ x,
        lambda f, y: y - f(y) @ jnp.linalg.inv(x),
        lambda g, y: y @ jnp.linalg.inv(x),
    ),
    "custom_jvp_call": squared,
    "custom_vjp_call": cubed,
    "jit": jax.jit(squared),
    "remat2": jax.checkpoint(lambda x: jnp.sin(x @ x)),
    "remat of scan": jax.checkpoint(
        lambda x: lax.scan(lambda c, _: (jnp.sin(c @ x), c), x, None, length=2),
        policy=jax.checkpoint_policies.dots_saveable,
    ),
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y, x),
    "platform": lambda x: lax.platform_dependent(
        x, cpu=lambda y: y @ y, default=lambda y: y @ y + 1
    ),
    "scan": lambda x: lax.scan(lambda c, _: (c @ x / 3, c), x, None, length=3),
    "nested": lambda x: lax.scan(
        lambda c, _: (lax.cond(c[0, 0] > 0, lambda y: jnp.linalg.solve(x, y @ x), jnp.sin, c), c),
        x,
        None,
        length=2,
    ),
    "fori_loop": lambda x: lax.fori_loop(0, 2, lambda _, c: c @ x, x),
    "scatter-mul": lambda x: (x @ x).at[jnp.array([0, 2])].mul(x[0, 0], unique_indices=True),
    "max-pooling": lambda x: lax.reduce_window(x @ x, -np.inf, lax.max, (2, 2), (1, 1), "VALID"),
}
OTHERS = {
    "linear_call": lambda x: jax.custom_derivatives.linear_call(
        lambda r, y: r @ y, lambda r, y: r.T @ y, x, x @ x
    ),
    "while": lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ x), (0, x))[
        1
    ],
    "custom_vmap_call": doubled,
    "reduce": lambda x: lax.reduce(x @ x, ZERO, lambda a, b: a + b + ZERO * a, (0,)),
    "reduce_window": lambda x: lax.reduce_window(
        x @ x, ONE, lambda a, b: a * b + ZERO, (2, 2), (1, 1), "VALID"
    ),
    "sort": lambda x: lax.sort((x @ x, x), num_keys=1)[1],
    "associative_scan": lambda x: lax.associative_scan(jnp.matmul, jnp.stack([x, x, x])),
    "callback": lambda x: (
        jax.pure_callback(
            np.sin, jax.ShapeDtypeStruct((3, 3), ZERO.dtype), x, vmap_method="sequential"
        )
        @ x
    ),
}
# JAX has no rule to batch it.
NEVER_BATCHED = {"linear_call"}


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def with_gradient(fn, x):
    def total(x):
        value = fn(x)
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(value)), value

    return jax.grad(total, has_aux=True)(x)


CASES = {
    **OTHERS,
    **DIFFERENTIABLE,
    **{f"gradient of {n}": functools.partial(with_gradient, f) for n, f in DIFFERENTIABLE.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_product_inside_is_rewritten_and_the_values_stay(name):
    fn = CASES[name]
    new = rewritten(fn, RULES)
    close(jax.jit(new)(X), jax.jit(fn)(X))
    assert contains(jax.make_jaxpr(fn)(X), PRODUCT)
    assert not contains(jax.make_jaxpr(new)(X), PRODUCT)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in NEVER_BATCHED])
def test_a_rewritten_function_is_batched_as_it_was(name):
    xs = np.stack([X, X + 0.1, X * 1.5])
    each = [CASES[name](jnp.asarray(x)) for x in xs]
    many = jax.jit(jax.vmap(rewritten(CASES[name], RULES)))(xs)
    close(many, jax.tree.map(lambda *leaves: np.stack(leaves), *each))


def test_a_loop_over_a_reference_stays_as_it_is():
    new = rewritten(in_a_reference, RULES)
    close(jax.jit(new)(X), jax.jit(in_a_reference)(X))
