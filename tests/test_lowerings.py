"""Lowerings: the same values and gradients as XLA's own operations, whatever their parameters."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dist_ens.execution import lowerings
from dist_ens.execution.rewrite import contains, rewritten
from dist_ens.execution.spec import LOWERINGS
from dist_ens.layout import BATCH, REPLICATED, Layout
from dist_ens.plan import collectives

CONVOLUTIONS = ["patches", "canonical", "apart"]
NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
LAYOUTS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HWNC", "IOHW", "NWHC")]


def random_arrays(*shapes, seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def value_and_gradients(fn, *args):
    """A function's value, and its gradients along one random direction."""
    out = jax.eval_shape(fn, *args)
    direction = np.random.default_rng(9).normal(size=out.shape).astype(out.dtype)

    def along(*args):
        value = fn(*args)
        return (value * direction).sum(), value

    return jax.grad(along, argnums=tuple(range(len(args))), has_aux=True)


def assert_close(a, b, scale=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(
            x, y, rtol=scale, atol=scale * max(1.0, np.abs(y).max(initial=0))
        )


def random_convolution(seed, more_channels):
    """Arrays and parameters of a convolution in two dimensions, as wild as JAX allows."""
    random = np.random.default_rng(seed)
    pick = lambda *values: values[random.integers(len(values))]  # noqa: E731
    groups, grouped = pick(1, 1, 2, 3), pick("feature", "batch")
    feature_groups = groups if grouped == "feature" else 1
    batch_groups = groups if grouped == "batch" else 1
    layout = LAYOUTS[random.integers(len(LAYOUTS))]
    channels = int(random.integers(1, 4)) + more_channels
    sizes = {
        "N": int(random.integers(1, 4)) * batch_groups,
        "C": channels * feature_groups,
        "H": int(random.integers(5, 9)),
        "W": int(random.integers(5, 9)),
    }
    kernel = {"I": channels, "O": groups * int(random.integers(1, 4))}
    kernel |= {axis: int(random.integers(1, 4)) for axis in "HW"}
    params = {
        "window_strides": tuple(random.integers(1, 3, 2).tolist()),
        "padding": pick("SAME", "VALID", [(1, 0), (2, 1)]),
        "lhs_dilation": pick((1, 1), (1, 1), (2, 1)),
        "rhs_dilation": pick((1, 1), (1, 1), (1, 2)),
        "dimension_numbers": layout,
        "feature_group_count": feature_groups,
        "batch_group_count": batch_groups,
    }
    if params["lhs_dilation"] != (1, 1) and isinstance(params["padding"], str):
        params["padding"] = [(1, 1), (0, 2)]  # JAX defines no other
    shapes = [sizes[axis] for axis in layout[0]], [kernel[axis] for axis in layout[1]]
    return *random_arrays(*shapes, seed=seed), params


def by_rule(fn, name):
    """A function whose operations are computed by a lowering."""
    return jax.jit(rewritten(fn, {LOWERINGS[name].primitive: LOWERINGS[name].rule}))


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.long] if n % 2 else []) for n in range(140)]
)
def test_a_convolution_and_its_gradients_are_the_same(seed):
    # With many channels, the canonical layout has other forms.
    more_channels, rules = (0, CONVOLUTIONS) if seed < 100 else (14, ["canonical"])
    lhs, rhs, params = random_convolution(seed, more_channels)
    fn = value_and_gradients(lambda a, b: lax.conv_general_dilated(a, b, **params), lhs, rhs)
    expected = jax.jit(fn)(lhs, rhs)
    for rule in rules:
        assert_close(by_rule(fn, rule)(lhs, rhs), expected)


NARROW = {
    "whole": ((8, 16), (3, 16, 16), 1, "SAME"),
    "columns left over": ((6, 13), (3, 4, 8), 2, "VALID"),
    "fewer columns than neighbours": ((5, 3), (3, 2, 1), 1, "SAME"),
    "one channel": ((9, 9), (5, 1, 6), 1, "SAME"),
    "an odd number of channels": ((8, 10), (3, 3, 24), 2, "SAME"),
    "a line": ((40,), (7, 5, 8), 3, "SAME"),
    "a volume": ((5, 6, 7), (3, 2, 9), 1, "SAME"),
    "padding that takes away": ((8, 19), (3, 4, 8), 1, [(1, 0), (2, -9)]),
    "padding that takes away with a stride": ((6, 7), (2, 3, 4), 2, [(-1, 1), (0, -1)]),
    "a line without a stride": ((40,), (7, 8, 5), 1, "SAME"),
    "few features and padding that takes away": ((8, 19), (3, 8, 4), 1, [(1, 0), (2, -9)]),
    "padding and taking away": ((9, 30), (3, 4, 1), 1, [(0, 0), (-9, 3)]),
    "more taken away than there is": ((8,), (1, 11, 3), 3, [(3, -8)]),
    "no column": ((6, 2), (3, 4, 8), 1, "VALID"),
    "no feature": ((6, 6), (3, 4, 0), 1, "SAME"),
    "no channel": ((6, 6), (3, 0, 4), 1, "SAME"),
    "no axis of space": ((), (3, 4, 5), 1, []),
}


@pytest.mark.parametrize("case", NARROW)
def test_a_convolution_of_few_channels_is_the_same_among_neighbours(case):
    space, (taps, channels, features), stride, padding = NARROW[case]
    names = "N" + "DHW"[3 - len(space) :] + "C"
    kernel = (*(taps,) * len(space), channels, features)
    lhs, rhs = random_arrays((4, *space, channels), kernel)
    strides, layout = (stride,) * len(space), (names, names[1:-1] + "IO", names)

    def forward(lhs, rhs):
        return lax.conv_general_dilated(lhs, rhs, strides, padding, dimension_numbers=layout)

    def cropped(lhs, rhs):
        """What padding takes away is cropped first, as XLA:CPU 0.10.2 reads beyond its input."""
        if not isinstance(padding, list):
            return forward(lhs, rhs)
        parts = [(min(a, 0), min(b, 0), 0) for a, b in padding]
        lhs = lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *parts, (0, 0, 0)])
        rest = [(max(a, 0), max(b, 0)) for a, b in padding]
        return lax.conv_general_dilated(lhs, rhs, strides, rest, dimension_numbers=layout)

    fn = value_and_gradients(forward, lhs, rhs)
    expected = value_and_gradients(cropped, lhs, rhs)(lhs, rhs)
    assert_close(by_rule(fn, "canonical")(lhs, rhs), expected)
    if isinstance(padding, list):
        assert_close(by_rule(forward, "patches")(lhs, rhs), expected[1])


@pytest.mark.parametrize("lowering", CONVOLUTIONS)
def test_convolutions_of_many_members_are_the_same_and_none_is_grouped(lowering):
    lhs, rhs = random_arrays((3, 2, 6, 6, 4), (3, 3, 3, 4, 5))
    fn = value_and_gradients(
        lambda a, b: lax.conv(a.transpose(0, 3, 1, 2), b.transpose(3, 2, 0, 1), (2, 2), "SAME"),
        lhs[0],
        rhs[0],
    )
    many = jax.jit(jax.vmap(by_rule(fn, lowering)))
    by_hand = [fn(a, b) for a, b in zip(lhs, rhs, strict=True)]
    assert_close(many(lhs, rhs), jax.tree.map(lambda *leaves: jnp.stack(leaves), *by_hand))
    assert "feature_group_count = 3" in jax.jit(jax.vmap(fn)).lower(lhs, rhs).as_text()
    text = many.lower(lhs, rhs).as_text()
    assert "feature_group_count = 3" not in text
    assert "batch_group_count = 3" not in text
    assert ("stablehlo.convolution" in text) == (lowering != "patches")
    assert ("stablehlo.while" in text) == (lowering == "canonical")


@pytest.mark.parametrize(("num_examples", "together"), [(5, 1), (6, 2)])
def test_in_canonical_layout_the_gradient_of_a_kernel_is_no_convolution(num_examples, together):
    lhs, rhs = jnp.ones((num_examples, 6, 6, 2)), jnp.ones((3, 3, 2, 4))
    fn = by_rule(value_and_gradients(convolved, lhs, rhs), "canonical")
    text = str(jax.make_jaxpr(fn)(lhs, rhs))
    # The value and the gradient of the input; that of the kernel adds up over pairs of examples.
    assert text.count("conv_general_dilated[") == 2
    # XLA must leave both in their layout: barriers before and after.
    assert text.count("optimization_barrier") == 4
    assert text.count("scan[") == 1
    assert f"length={num_examples // together}" in text


@pytest.mark.parametrize(
    ("kernel", "params", "product"),
    [
        # Three shifts of the input, three of the gradient of the output.
        ((3, 3, 16, 8), {}, (48, 24)),
        ((5, 3, 4, 6), {}, (20, 18)),
        ((3, 3, 3, 16), {}, (9, 48)),
        ((3, 3, 4, 32), {}, None),  # patches of 68 numbers beside shifts of 108
        ((3, 3, 1, 32), {}, None),
        ((3, 3, 16, 8), {"window_strides": (2, 1)}, (48, 24)),
        ((3, 3, 16, 8), {"window_strides": (1, 2)}, None),
        ((3, 3, 16, 8), {"lhs_dilation": (2, 1)}, (48, 24)),
        ((3, 3, 16, 8), {"lhs_dilation": (1, 2)}, None),
        ((3, 3, 16, 8), {"rhs_dilation": (2, 1)}, (48, 24)),
        ((3, 3, 16, 8), {"rhs_dilation": (1, 2)}, (48, 24)),
        ((3, 3, 16, 8), {"padding": [(0, 2), (3, 0)]}, (48, 24)),
        ((3, 3, 16, 8), {"padding": [(1, 1), (0, 0)]}, (48, 24)),
        ((3, 4, 16, 8), {"padding": [(1, 1), (0, 0)]}, None),  # 9 columns instead of 6
        ((7, 1, 4, 8), {"padding": [(1, 1), (0, 0)]}, (28, 8)),
        ((3, 3, 6, 8), {"precision": lax.Precision.HIGHEST}, (18, 24)),
    ],
)
def test_gradients_of_kernels_are_products_of_shifts_where_these_are_faster(
    kernel, params, product
):
    params = {"window_strides": (1, 1), "padding": [(1, 1), (1, 1)]} | NHWC | params
    lhs, rhs = random_arrays((4, 8, 9, kernel[2]), kernel)
    fn = value_and_gradients(lambda a, b: lax.conv_general_dilated(a, b, **params), lhs, rhs)
    in_canonical = by_rule(fn, "canonical")
    assert_close(in_canonical(lhs, rhs), jax.jit(fn)(lhs, rhs))
    factors = []
    contains(
        jax.make_jaxpr(in_canonical)(lhs, rhs),
        lax.dot_general_p,
        lambda a, b, precision, **_: factors.append((a, b, precision)),  # false: all are seen
    )
    [(a, b, precision)] = factors
    assert (precision is not None) == ("precision" in params)
    # Patches have one more axis, of groups.
    assert ((a.shape[-1], b.shape[-1]) if a.ndim == 2 else None) == product


@pytest.mark.parametrize("channels", [1, 16])
def test_the_gradient_of_a_kernel_keeps_its_precision_over_many_examples(channels):
    random = np.random.default_rng(0)
    lhs = jnp.asarray(random.uniform(size=(4096, 4, 4, channels)), jnp.bfloat16)
    gradient = jax.grad(lambda kernel: convolved(lhs, kernel).astype(jnp.float32).sum())
    found = by_rule(gradient, "canonical")(jnp.ones((3, 3, channels, 1), jnp.bfloat16))
    # The middle of the kernel meets every input once.
    expected = float(lhs[..., 0].astype(jnp.float32).sum())
    assert float(found[1, 1, 0, 0]) == pytest.approx(expected, rel=0.01)


SIDES = [1, 2, 3, 4, 5, 13, 16, 17, 40]


@pytest.mark.parametrize("seed", range(25))
def test_a_product_and_its_gradients_are_the_same_in_whole_vectors(seed):
    random = np.random.default_rng(seed)
    height, terms, width = random.choice(SIDES, 3)
    i, j = random.integers(0, 2, 2)
    lhs, rhs = random_arrays((height, terms), (terms, width), seed=seed)
    lhs, rhs = lhs if i else lhs.T, rhs.T if j else rhs
    fn = value_and_gradients(lambda a, b: lax.dot_general(a, b, (((i,), (j,)), ((), ()))), lhs, rhs)
    assert_close(by_rule(fn, "aligned")(lhs, rhs), jax.jit(fn)(lhs, rhs))


@pytest.mark.parametrize("seed", range(10))
def test_a_gradient_of_many_terms_is_the_same_made_flat(seed):
    random = np.random.default_rng(seed)
    terms = (int(random.integers(70, 90)),) if seed % 2 else tuple(random.integers(9, 12, 2))
    one, two = (int(random.integers(16, 70)),), tuple(random.integers(4, 8, 2))
    height, width = [(one, one), (one, two), (two, one)][seed % 3]
    lhs, rhs = random_arrays((3, *terms, *height), (3, *terms, *width))
    contracted = tuple(range(len(terms)))

    def fn(lhs, rhs):
        return lax.dot_general(lhs, rhs, ((contracted, contracted), ((), ())))

    traced = jax.make_jaxpr(fn)(lhs[0], rhs[0])
    assert contains(traced, lowerings.PRODUCT, lowerings.becomes_flat)
    made_flat, expected = by_rule(fn, "flat"), jax.vmap(jax.jit(fn))(lhs, rhs)
    assert_close(made_flat(lhs[0], rhs[0]), expected[0])
    assert_close(jax.vmap(made_flat)(lhs, rhs), expected)  # of three members


WINDOWS = [
    ((1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    ((1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
    ((1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    ((1, 3, 2, 1), (1, 1, 1, 1), "VALID"),
    ((1, 1, 2, 1), (1, 3, 2, 1), "VALID"),
    ((1, 3, 3, 1), (1, 3, 3, 1), ((0, 0), (2, 1), (1, 2), (0, 0))),
]


@pytest.mark.parametrize(("window", "strides", "padding"), WINDOWS)
@pytest.mark.parametrize("values", ["distinct", "ties", "nan", "low"])
def test_the_gradient_of_max_pooling_is_the_same_bit_for_bit(window, strides, padding, values):
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 7, 8, 3)).astype(np.float32)
    if values == "ties":
        x = np.round(x)
    elif values == "nan":
        x[random.random(x.shape) < 0.2] = np.nan
    elif values == "low":
        x[random.random(x.shape) < 0.5] = -np.inf

    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

    # Small whole numbers, whose sums where windows overlap are the same in any order.
    direction = random.integers(-9, 9, jax.eval_shape(pool, x).shape).astype(np.float32)

    def gradient(x):
        return jax.vjp(pool, x)[1](direction)[0]

    by_masks = by_rule(gradient, "masks")
    np.testing.assert_array_equal(by_masks(x), jax.jit(gradient)(x))
    assert contains(jax.make_jaxpr(gradient)(x), lowerings.MAX_POOL_GRADIENT)
    assert not contains(jax.make_jaxpr(by_masks)(x), lowerings.MAX_POOL_GRADIENT)


def test_the_gradient_of_min_pooling_is_the_same():
    [x] = random_arrays((1, 6, 6, 1))
    pool = lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")  # noqa: E731
    gradient = jax.grad(lambda x: (pool(x) ** 2).sum())
    np.testing.assert_array_equal(by_rule(gradient, "masks")(x), jax.jit(gradient)(x))


def convolved(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", **NHWC)


def embedded(x, w):
    return x[..., :1] * w[jnp.int32(jnp.abs(x[..., 0])) % len(w)]


PATCHES, CANONICAL, ALIGNED = (
    (LOWERINGS[name].primitive, LOWERINGS[name].rule)
    for name in ("patches", "canonical", "aligned")
)
SCATTER = lowerings.SCATTER_ADD, lowerings.scatter_add_by_columns
SUMS = {  # lowering, function, an example's shape, the weights' shape
    "patches": (PATCHES, convolved, (6, 6, 2), (3, 3, 2, 5)),
    "patches of a large kernel": (PATCHES, convolved, (4, 4, 2), (5, 5, 2, 5)),
    "canonical": (CANONICAL, convolved, (6, 6, 2), (3, 3, 2, 5)),
    "canonical, of a large kernel": (CANONICAL, convolved, (4, 4, 2), (5, 5, 2, 5)),
    "aligned": (ALIGNED, jnp.dot, (20,), (20, 17)),
    "aligned, with few weights": (ALIGNED, jnp.dot, (20,), (20, 3)),
    "embedding": (SCATTER, embedded, (6, 2), (7, 4)),
    "embedding of one word": (SCATTER, embedded, (2,), (7, 4)),
}


def over_two_columns(fn, batch=BATCH):
    """The program of a value and gradients of examples and weights, on two columns of devices."""
    layout = Layout.make(1, devices=jax.devices()[:2])
    return jax.jit(layout.map_rows(fn, (batch, REPLICATED), ((batch, REPLICATED), batch)))


@pytest.mark.parametrize("num_examples", [8, 7])
@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_over_examples_is_the_same_by_columns(kind, num_examples):
    (primitive, rule), fn, of_example, of_weights = SUMS[kind]
    x, w = random_arrays((num_examples, *of_example), of_weights)
    x *= 3
    fn = value_and_gradients(fn, x, w)
    by_columns = rewritten(fn, {primitive: partial(rule, columns=2)})
    program = over_two_columns(by_columns, BATCH if num_examples % 2 == 0 else REPLICATED)
    assert_close(program(x, w), fn(x, w))
    if num_examples % 2 == 0:  # The gradient of the weights is summed, and nothing else is sent.
        text = program.lower(x, w).compile().as_text()
        found = collectives(text, np.arange(2).reshape(1, 2))
        assert [(each.kind, each.bytes) for each in found] == [("all-reduce", w.nbytes)]


def test_a_gradient_of_weights_is_summed_in_the_order_of_the_weights():
    x, w = random_arrays((8, 20), (20, 17))
    fn = value_and_gradients(lambda x, w: jnp.tensordot(x, w, 1), x, w)
    swapped = rewritten(fn, {lowerings.PRODUCT: lowerings.product_of_swapped_factors})
    program = over_two_columns(swapped)
    assert_close(program(x, w), fn(x, w))
    summed = re.findall(r"(\S+)\{\S+\} all-reduce\(", program.lower(x, w).compile().as_text())
    assert summed == ["f32[20,17]"]  # It is f32[17,20] without the lowering.


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x[:, [0, 2, 1, 0]],
        lambda x, w: x[np.arange(8), np.arange(8) % 3],
        lambda x, w: jnp.take_along_axis(x, jnp.arange(8)[:, None] % 3, 1),
        lambda x, w: jax.vmap(lambda row: row[jnp.int32(row[0]) % 3])(x),
        lambda x, w: x + w[0][None],
    ],
)
def test_other_scatters_stay_as_they_are(fn):
    x, w = np.arange(24, dtype=np.float32).reshape(8, 3), np.ones((2, 3), np.float32)
    fn = value_and_gradients(fn, x, w)
    rules = {lowerings.SCATTER_ADD: partial(lowerings.scatter_add_by_columns, columns=2)}
    assert str(jax.make_jaxpr(rewritten(fn, rules))(x, w)).count("shard_map") == 0
    assert_close(jax.jit(rewritten(fn, rules))(x, w), fn(x, w))
