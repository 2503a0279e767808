"""Members with heads: networks, losses, and heads as predictors of scores and predictions."""

import json

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
import networks
from commands import dist_ens
from dist_ens.ground.errors import UserError

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 6)).astype(np.float32)
LABELS = (np.arange(16) % 3).astype(np.int32)
DATA = {"inputs": X, "labels": LABELS}
MLP = de.models.mlp((6,), 3, hidden_sizes=(8,))
CATEGORICAL = de.losses.of_heads(de.losses.categorical(3))


# The same weights in, the same numbers out as the code of others; see benchmarks/golden_heads.py


def golden(kind):
    """The inputs, the weights and the outputs [heads, batch, outputs] of a network of others."""
    with np.load("tests/heads_by_torch.npz") as arrays:
        of_kind = {
            n.removeprefix(f"{kind}/"): arrays[n] for n in arrays if n.startswith(f"{kind}/")
        }
    weights = {n.removeprefix("weights/"): of_kind[n] for n in of_kind if n.startswith("weights/")}
    return of_kind["inputs"], weights, of_kind["outputs"]


def plain(outputs=3):
    return de.models.mlp((5,), outputs, hidden_sizes=(16, 16))


def assert_outputs(member, params, inputs, expected):
    like = jax.eval_shape(member.init, jax.random.key(0), inputs)[0]
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, like)
    found = member.apply(params, (), inputs, None, False)[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_batch_ensemble_is_that_of_torch_uncertainty():
    inputs, weights, expected = golden("batch_ensemble")
    names = ["layers.0", "layers.1", "final_layer"]
    params = {
        "network": [{"w": weights[f"{name}.linear.weight"].T, "b": None} for name in names],
        "own": {f"{n}/b": weights[f"{name}.bias"] for n, name in enumerate(names)},
        "r": {f"{n}/w": weights[f"{name}.r_group"] for n, name in enumerate(names)},
        "s": {f"{n}/w": weights[f"{name}.s_group"] for n, name in enumerate(names)},
    }
    assert_outputs(de.models.batch_ensemble(plain(), heads=4), params, inputs, expected)


@pytest.mark.parametrize("mini", [False, True])
def test_tabm_is_that_of_its_authors(mini):
    inputs, weights, expected = golden("tabm_mini" if mini else "tabm")
    blocks = [f"backbone.blocks.{n}.0" for n in range(2)]
    biases = [weights[f"{name}.bias"] for name in blocks]
    params = {
        "network": [
            {"w": weights[f"{name}.weight"].T, "b": bias if mini else None}
            for name, bias in zip(blocks, biases, strict=True)
        ]
        + [{"w": None, "b": None}],
        "own": {"2/w": weights["output.weight"], "2/b": weights["output.bias"]},
        "r": {"0/w": weights["backbone.affine.weight"]} if mini else {},
        "s": {},
    }
    if not mini:
        params["own"] |= {f"{n}/b": bias for n, bias in enumerate(biases)}
        for part in "rs":
            params[part] = {f"{n}/w": weights[f"{name}.{part}"] for n, name in enumerate(blocks)}
    assert_outputs(de.models.tabm(plain(), heads=4, mini=mini), params, inputs, expected)


@pytest.mark.parametrize("gamma", [1, 2])
def test_packed_is_that_of_torch_uncertainty(gamma):
    inputs, weights, expected = golden("packed" if gamma == 1 else "packed_gamma2")
    params = []
    for name, groups in (("layers.0", 1), ("layers.1", gamma), ("final_layer", 1)):
        # theirs: [heads * groups, out, in], but for the first layer, whose units are of all heads.
        w = weights[f"{name}.weight"]
        w = w.reshape(4, groups, -1, w.shape[-1]).swapaxes(-1, -2)
        params.append({"w": w, "b": weights[f"{name}.bias"].reshape(4, -1)})
    member = de.models.packed((5,), 3, hidden_sizes=(16, 16), heads=4, alpha=2, gamma=gamma)
    assert_outputs(member, params, inputs, expected)


# Training


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(nn.relu(x)))


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Conv(4, (3, 3))(x)).mean(axis=(1, 2)))


TRUNK = de.models.mlp((6,), 5, hidden_sizes=(8,))
HEAD = de.models.mlp((5,), 3, hidden_sizes=())
MEMBERS = {
    "batch_ensemble": lambda: de.models.batch_ensemble(MLP, heads=4),
    "tabm": lambda: de.models.tabm(MLP, heads=4),
    "packed": lambda: de.models.packed((6,), 3, hidden_sizes=(8, 8), heads=4),
    "trunk_and_heads": lambda: de.models.trunk_and_heads(TRUNK, HEAD, heads=4),
}


def ensemble_of(member, mesh=(1, 1), objective=CATEGORICAL, num_members=2, **options):
    layout = networks.layout_on(mesh, num_members)
    options = {"num_members": num_members, "layout": layout} | options
    return de.Ensemble(member, optax.sgd(0.1), objective, **options)


def by_hand(member, params, steps=3):
    """The parameters of a member after some steps on the mean of the heads' losses."""

    def loss(params):
        outputs = member.apply(params, model_state, X, None, True)[0]
        losses = [
            optax.softmax_cross_entropy_with_integer_labels(each, LABELS).mean() for each in outputs
        ]
        return sum(losses) / len(losses)

    model_state = jax.eval_shape(member.init, jax.random.key(0), X)[1]
    for _ in range(steps):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.jit(jax.grad(loss))(params))
    return params


@pytest.mark.parametrize("name", MEMBERS)
def test_members_with_heads_are_those_of_a_loop_by_hand_and_their_heads_predict(name):
    member = MEMBERS[name]()
    begun = ensemble_of(member).init(DATA)
    expected = [by_hand(member, networks.member_of(begun.params, k)) for k in range(2)]
    outputs = [member.apply(each, _state_of(member), X, None, False)[0] for each in expected]
    probs = np.concatenate([jax.nn.softmax(each) for each in outputs])
    cases = [((1, 1), each) for each in ("vmap", "unroll", "map", "chunk:1", "loop")]
    cases += [((2, 1), "vmap"), ((2, 2), "vmap"), ((2, 2), "loop"), ((1, 1), "waves")]
    for mesh, execution in cases:
        options = {"waves": 2} if execution == "waves" else {"execution": execution}
        ensemble = ensemble_of(member, mesh, **options)
        state = ensemble.init(DATA)
        for _ in range(3):
            state, _ = ensemble.update(state, DATA)
        for position in range(2):
            found = networks.member_of(state.params, position)
            networks.assert_close_to_scale(found, expected[position])
        prediction = ensemble.predict(state, X)
        np.testing.assert_allclose(prediction.members, probs, atol=1e-5)
        np.testing.assert_allclose(prediction.mean, probs.mean(axis=0), atol=1e-5)


def _state_of(member):
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape), jax.eval_shape(member.init, jax.random.key(0), X)[1]
    )


def test_heads_predict_on_a_model_axis_and_with_dropout():
    member = de.models.batch_ensemble(MLP, heads=4)
    layout = de.Layout.make(2, ensemble_axis=2, model_axis=2)
    ensemble, alone = ensemble_of(member, layout=layout), ensemble_of(member)
    state, of_alone = ensemble.init(DATA), alone.init(DATA)
    found, expected = ensemble.predict(state, X).members, alone.predict(of_alone, X).members
    np.testing.assert_allclose(found, expected, atol=1e-6)

    dropping = ensemble_of(de.models.batch_ensemble(networks.Asking(3), heads=4), dropout_samples=5)
    state = dropping.init(DATA)
    outputs = dropping.apply(state, X)
    assert outputs.shape == (8, 16, 5, 3)
    assert np.std(outputs, axis=2).min() > 0
    pooled = jax.nn.softmax(outputs).mean(axis=(0, 2))
    np.testing.assert_allclose(dropping.predict(state, X).mean, pooled, atol=1e-6)


def test_scales_begin_as_the_papers_say():
    params = de.models.batch_ensemble(MLP, heads=64).init(jax.random.key(0), X)[0]
    for part in "rs":
        for scales in params[part].values():
            assert {*np.unique(scales).tolist()} == {-1.0, 1.0}
    params = de.models.batch_ensemble(MLP, heads=64, scales="normal").init(jax.random.key(0), X)[0]
    drawn = np.concatenate([np.ravel(params[part]["0/w"]) for part in "rs"])  # 64 * (6 + 8)
    assert abs(drawn.mean() - 1) < 4 * 0.5 / np.sqrt(drawn.size)
    assert abs(drawn.std() - 0.5) < 4 * 0.5 / np.sqrt(2 * drawn.size)
    deep = de.models.mlp((6,), 3, hidden_sizes=(8, 8), init="fan_in_uniform")
    params = de.models.tabm(deep, heads=64).init(jax.random.key(0), X)[0]
    assert {*np.unique(params["r"]["0/w"]).tolist()} == {-1.0, 1.0}
    for scales in (params["r"]["1/w"], *params["s"].values()):
        assert (np.asarray(scales) == 1).all()
    hidden, last = np.asarray(params["own"]["0/b"]), np.asarray(params["own"]["2/w"])
    assert (hidden == hidden[0]).all()
    assert len(np.unique(last[:, 0, 0])) == 64


def test_heads_of_other_networks_are_networks_with_scaled_arrays():
    for network, inputs in ((Dense(), X), (Conv(), np.ones((4, 5, 5, 2), np.float32))):
        base, member = de.as_member(network), de.models.batch_ensemble(network, heads=3)
        params, model_state = member.init(jax.random.key(0), inputs)
        found = member.apply(params, model_state, inputs, None, False)[0]
        for head in range(3):
            alone = _filled(params, head)
            state = jax.tree.map(lambda leaf, head=head: leaf[head], model_state)
            expected = base.apply(alone, state, inputs, None, False)[0]
            np.testing.assert_allclose(found[head], expected, atol=1e-5)


def _filled(params, head):
    """The parameters of one head: its own arrays, and shared ones times the outer product r s."""

    def fill(path, leaf):
        name = "/".join(each.key for each in path)
        if name in params["own"]:
            return params["own"][name][head]
        r, s = (np.asarray(params[part][name][head]) for part in "rs")
        return np.asarray(leaf) * np.outer(r, s)

    is_out = lambda leaf: leaf is None  # noqa: E731
    return jax.tree_util.tree_map_with_path(fill, params["network"], is_leaf=is_out)


def test_arrays_that_a_network_leaves_out_do_not_move_the_scales():
    class Bare(eqx.Module):
        first: eqx.nn.Linear
        last: eqx.nn.Linear

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.first = eqx.nn.Linear(6, 8, use_bias=False, key=one)
            self.last = eqx.nn.Linear(8, 3, key=two)

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x)))

    member = de.models.batch_ensemble(Bare, heads=2)
    params, model_state = member.init(jax.random.key(0), X)
    found = member.apply(params, model_state, X, None, False)[0]
    for head in range(2):
        first, last = (
            np.asarray(part.weight).T
            for part in jax.tree.leaves(
                params["network"], is_leaf=lambda node: isinstance(node, eqx.nn.Linear)
            )
        )
        (r0, r1), (s0, s1) = (
            [np.asarray(params[part][name][head]) for name in ("first/weight", "last/weight")]
            for part in "rs"
        )
        hidden = np.tanh(((X * r0) @ first) * s0)
        expected = ((hidden * r1) @ last) * s1 + np.asarray(params["own"]["last/bias"][head])
        np.testing.assert_allclose(found[head], expected, atol=1e-5)


def test_four_heads_have_at_most_a_tenth_more_parameters_than_one_network():
    one = de.models.mlp((784,), 10, hidden_sizes=(256, 256))
    four = de.models.batch_ensemble(one, heads=4)
    count_of_one, count = (
        sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(each.init, key, inputs)[0]))
        for each in (one, four)
        for key, inputs in [(jax.random.key(0), jnp.zeros((1, 784)))]
    )
    assert count_of_one < count <= 1.1 * count_of_one


# Heads as predictors


def test_heads_are_predictors_in_scores_records_selection_and_calibration(tmp_path):
    ensemble = ensemble_of(MEMBERS["batch_ensemble"]())
    history = []
    result = de.fit(
        ensemble,
        DATA,
        steps=4,
        batch_size=8,
        eval_data=DATA,
        eval_every=2,
        checkpoints=de.Checkpoints(tmp_path),
        callbacks=[lambda info: history.append(info)],
        progress=False,
    )
    ids = [f"{member}.{head}" for member in range(2) for head in range(4)]
    scores = de.evaluate(ensemble, result.state, DATA)
    assert [each["member_id"] for each in scores.members] == ids
    assert "member 1.3" in str(scores)
    recorded = {name for record in result.history for name in record}
    assert {"test/nll/member_01.3", "train/loss/member_01"} <= recorded
    probs = np.asarray(ensemble.predict(result.state, X).members)
    losses = -np.log(probs[:, np.arange(16), LABELS])
    found = [each["nll"] for each in scores.members]
    np.testing.assert_allclose(found, losses.mean(axis=1), rtol=1e-5)
    pooled = -np.log(probs.mean(axis=0)[np.arange(16), LABELS]).mean()
    assert scores.ensemble["nll"] == pytest.approx(pooled, rel=1e-5)

    chosen = de.select(ensemble, result.state, DATA, size=3)
    best = min(found)
    assert chosen.path[0] == pytest.approx(best, rel=1e-5)
    assert len(chosen.member_ids) == len(chosen.weights)
    pool = dict(zip(chosen.member_ids, chosen.weights, strict=True))
    weights = [pool.get(each, 0) for each in ids]
    weighted = ensemble.predict(result.state, X, weights=weights).mean
    small = ensemble.predict(chosen.state, X, weights=chosen.weights).mean
    np.testing.assert_allclose(small, weighted, atol=1e-6)

    calibration = de.calibrate(ensemble, result.state, DATA, method="temperature")
    assert calibration.predictor.member_ids == tuple(ids)
    run = de.load(tmp_path, ensemble=ensemble)
    np.testing.assert_array_equal(run.predict(X).members, probs)


CONFIG = """
import dist_ens as de

def get_config():
    data = dict(source="digits", std=(16.0,), validation=0.1, examples="bootstrap")
    return dict(num_members=2, steps=4, execution="vmap", data=data)

def make_member(spec):
    return de.models.tabm(de.models.mlp((8, 8), 10, hidden_sizes=(8,)), heads=3)

def make_objective(spec):
    return de.losses.of_heads(de.losses.categorical(10))
"""


@pytest.mark.long
def test_commands_choose_and_score_heads(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    config, run = f"--config={tmp_path / 'config.py'}", str(tmp_path / "run")
    for words in (
        ["train", config, f"--workdir={run}"],
        ["evaluate", config, f"--workdir={run}", "--out_of_bag"],
        ["members", run, "choose", "--size=3", "--metric=nll", config],
        ["evaluate", config, f"--workdir={run}"],
    ):
        ended = dist_ens(*words)
        assert ended.returncode == 0, (words, ended.stdout, ended.stderr)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["num_members"], summary["heads"]) == (2, 3)
    assert [each["member_id"] for each in summary["members"]][3] == "1.0"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "2 with 3 heads each" in page
    assert "of_heads(categorical) of" in page


def test_members_with_heads_stop_by_the_mean_of_their_heads_scores():
    ensemble = ensemble_of(MEMBERS["packed"](), num_members=4)
    halving = de.callbacks.SuccessiveHalving("nll", every=2, keep=0.5)
    result = de.fit(
        ensemble,
        DATA,
        steps=4,
        batch_size=8,
        eval_data=DATA,
        eval_every=2,
        callbacks=[halving],
        progress=False,
    )
    assert len(result.stopped) == 3


# Losses of all heads


OUTPUTS = RANDOM.normal(size=(5, 7, 2)).astype(np.float32)
TARGETS = RANDOM.normal(size=7).astype(np.float32)


def test_losses_of_all_heads_have_the_values_of_their_formulas():
    of_heads, losses = de.losses.of_heads, de.losses
    point, normal = losses.squared_error(), losses.gaussian()
    values, y = OUTPUTS[..., 0].astype(float), TARGETS.astype(float)
    pairs = np.abs(values[:, None] - values[None]).sum(axis=(0, 1))
    expected = np.abs(values - y).mean(axis=0) - pairs / (2 * 5 * 5)
    found = of_heads(point, joint="crps").losses(OUTPUTS[..., :1], TARGETS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    nll = np.stack([normal.example_loss(each, TARGETS) for each in OUTPUTS]).astype(float)
    found = of_heads(normal, joint="mixture_nll").losses(OUTPUTS, TARGETS)
    np.testing.assert_allclose(found, -np.log(np.exp(-nll).mean(axis=0)), rtol=1e-5, atol=1e-6)
    # Labels may be shares of the classes, as those of mixup: the cross-entropy of the mean of two.
    logits = np.log(np.array([[[0.9, 0.1]], [[0.1, 0.9]]], np.float32))
    classes = of_heads(losses.categorical(2), joint="mixture_nll")
    for labels in (np.array([[0.5, 0.5]], np.float32), np.array([1])):
        np.testing.assert_allclose(classes.losses(logits, labels), [np.log(2)], rtol=1e-5)
    np.testing.assert_allclose(
        of_heads(normal).losses(OUTPUTS, TARGETS), nll.mean(axis=0), rtol=1e-5
    )

    ncl = of_heads(point, joint="ncl", strength=0.3).losses(OUTPUTS[..., :1], TARGETS)
    apart = (values - values.mean(axis=0)) ** 2
    np.testing.assert_allclose(ncl, ((values - y) ** 2 - 0.3 * apart).mean(axis=0), rtol=1e-5)
    # With all of it, the loss is that of the mean of the heads.
    whole = of_heads(point, joint="ncl", strength=1.0).losses(OUTPUTS[..., :1], TARGETS)
    np.testing.assert_allclose(whole, (values.mean(axis=0) - y) ** 2, rtol=1e-4, atol=1e-5)
    own = of_heads(point, joint=lambda outputs, labels: outputs.mean(axis=0)[..., 0])
    np.testing.assert_allclose(own.losses(OUTPUTS, TARGETS), values.mean(axis=0), rtol=1e-5)


def test_the_crps_of_a_mixture_is_its_integral():
    # The integral of (F(z) - [z >= y])^2 over z, with F the mean of the heads' distributions.
    from scipy.stats import norm

    found = de.losses.of_heads(de.losses.gaussian(), joint="crps").losses(OUTPUTS, TARGETS)
    mean, variance = (np.asarray(each, float) for each in de.losses.normal_distribution(OUTPUTS))
    z = np.linspace(-12, 12, 400_001)
    for column, y in enumerate(TARGETS):
        cdf = norm.cdf(z[:, None], mean[:, column], np.sqrt(variance[:, column])).mean(axis=1)
        expected = np.trapezoid((cdf - (z >= y)) ** 2, z)
        assert found[column] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("joint", "is_calibrated"), [("crps", True), (None, False)])
def test_heads_trained_by_their_crps_spread_as_much_as_their_mean_errs(joint, is_calibrated):
    # Two values for each input. The mean of the heads' losses is lowest for heads that all predict
    # their mean.
    random = np.random.default_rng(1)
    x = random.uniform(-1, 1, (512, 1)).astype(np.float32)
    modes = random.choice([-1, 1], 512) * (1 + x[:, 0] ** 2)
    y = (modes + 0.1 * random.normal(size=512)).astype(np.float32)
    trunk = de.models.mlp((1,), 16, hidden_sizes=(32,))
    member = de.models.trunk_and_heads(trunk, de.models.mlp((16,), 1, hidden_sizes=()), heads=16)
    ensemble = de.Ensemble(
        member,
        optax.adam(3e-3),
        de.losses.of_heads(de.losses.squared_error(), joint=joint),
        num_members=1,
        layout=networks.layout_on((1, 1), 1),
    )
    data = {"inputs": x, "labels": y}
    result = de.fit(ensemble, data, steps=1500, batch_size=128, progress=False)
    heads = np.asarray(ensemble.apply(result.state, x))[..., 0]
    errors = (heads.mean(axis=0) - y) ** 2
    ratio = np.sqrt(heads.var(axis=0).mean() / errors.mean())
    assert (0.9 <= ratio <= 1.1) == is_calibrated, ratio


# Stein variational gradient descent


def train_particles(log_density, *, steps, rate, heads=64):
    """Particles in two dimensions, after training with `svgd`."""

    def loss_fn(params, model_state, batch, key):
        return -jax.vmap(log_density)(params).mean(), (model_state, {})

    member = de.as_member(
        init=lambda key, inputs: (jax.random.normal(key, (heads, 2)), ()), heads=heads
    )
    layout = networks.layout_on((1, 1), 1)
    ensemble = de.Ensemble(
        member,
        optax.adam(rate),
        loss_fn,
        num_members=1,
        layout=layout,
        methods=[de.methods.svgd()],
    )
    batches = iter(lambda: {"inputs": np.zeros((1, 1), np.float32)}, None)
    result = de.fit(ensemble, batches, steps=steps, progress=False)
    return np.asarray(result.state.params[0])


MEAN = jnp.array([1.0, -2.0])
COVARIANCE = jnp.array([[2.0, 0.8], [0.8, 1.0]])


def gaussian_density(x):
    return jax.scipy.stats.multivariate_normal.logpdf(x, MEAN, COVARIANCE)


def banana_density(x):
    """x_0 is N(0, 1), and x_1 is N(x_0^2 / 4, 1 / 4): mean (0, 1/4), variances 1 and 1/4 + 1/8."""
    return -(x[0] ** 2) / 2 - 2 * (x[1] - x[0] ** 2 / 4) ** 2


def test_particles_have_the_mean_and_the_covariance_of_their_target():
    # So few particles have less variance than their target, by a tenth, and by a sixth in the tail
    # of the banana.
    particles = train_particles(gaussian_density, steps=2000, rate=0.05)
    np.testing.assert_allclose(particles.mean(axis=0), MEAN, atol=0.05)
    np.testing.assert_allclose(np.cov(particles.T), COVARIANCE, rtol=0.12)
    particles = train_particles(banana_density, steps=2000, rate=0.05)
    np.testing.assert_allclose(particles.mean(axis=0), [0, 0.25], atol=0.05)
    np.testing.assert_allclose(np.cov(particles.T), [[1, 0], [0, 0.375]], rtol=0.2, atol=0.02)


@pytest.mark.parametrize("part", ["all", "heads"])
def test_the_gradient_of_particles_is_the_update_written_out(part):
    particles, trunk = RANDOM.normal(size=(5, 3)).astype(np.float32), np.float32(0.7)
    inputs = RANDOM.normal(size=3).astype(np.float32)

    def loss(params, model_state, batch, info):
        theta = params["heads"] if part == "heads" else params
        slope = params["trunk"] if part == "heads" else trunk
        return ((slope * theta @ inputs - 1) ** 2).mean(), (model_state, {})

    params = {"trunk": trunk, "heads": particles} if part == "heads" else particles
    method = de.methods.svgd(num_examples=20, prior_std=2.0)
    info = de.methods.LossInfo(jax.random.key(0), jax.random.key(1), 0, None, None)
    value, found = jax.value_and_grad(lambda p: method(loss)(p, (), {}, info)[0])(params)
    errors = trunk * particles @ inputs - 1
    assert value == pytest.approx((errors**2).mean(), rel=1e-5)
    many = de.methods.svgd(num_examples=1e6)(loss)
    assert many(params, (), {}, info)[0] == pytest.approx(float(value), rel=1e-6)
    if part == "heads":
        # d/dt mean (t a - 1)^2 = mean 2 (t a - 1) a
        assert found["trunk"] == pytest.approx((2 * errors * (particles @ inputs)).mean(), rel=1e-4)
        found = found["heads"]
    theta = particles.astype(float)
    score = -20 * 2 * errors[:, None] * trunk * inputs[None] - theta / 2.0**2
    squared = ((theta[:, None] - theta[None]) ** 2).sum(axis=-1)
    h = np.median(squared) / np.log(6)
    for i in range(5):
        direction = np.zeros(3)
        for j in range(5):
            k = np.exp(-squared[j, i] / h)
            direction += k * score[j] - 2 / h * (theta[j] - theta[i]) * k
        np.testing.assert_allclose(found[i], -direction / 5, rtol=1e-4, atol=1e-4)


def test_heads_whose_outputs_repel_each_other_differ_more():
    def spread(methods):
        member = de.models.trunk_and_heads(TRUNK, HEAD, heads=4)
        ensemble = ensemble_of(member, num_members=1, methods=methods)
        result = de.fit(ensemble, DATA, steps=200, batch_size=16, progress=False)
        return float(np.var(ensemble.predict(result.state, X).members, axis=0).mean())

    assert spread([de.methods.svgd(space="outputs")]) > 1.5 * spread([])


# Mistakes


def test_mistakes_with_heads_are_told_where_they_are_made():
    with pytest.raises(UserError, match="has 4 heads, and categorical is the loss of one. Give"):
        ensemble_of(MEMBERS["tabm"](), objective=de.losses.categorical(3))
    with pytest.raises(UserError, match="takes a member with heads, and .* has none"):
        ensemble_of(MLP)
    with pytest.raises(UserError, match="joint='crps' takes gaussian or squared_error: got categ"):
        de.losses.of_heads(de.losses.categorical(3), joint="crps")
    with pytest.raises(UserError, match="joint is 'crsp'. Did you mean 'crps'"):
        de.losses.of_heads(de.losses.gaussian(), joint="crsp")
    with pytest.raises(UserError, match="of_heads takes the objective of one head"):
        de.losses.of_heads(de.losses.categorical)
    crps = de.losses.of_heads(de.losses.squared_error(), joint="crps")
    apart = ensemble_of(
        de.models.packed((6,), 1, heads=4), objective=crps, methods=[de.methods.svgd()]
    )
    with pytest.raises(UserError, match="svgd needs the mean of the heads' losses"):
        de.fit(apart, DATA, steps=1, batch_size=16, progress=False)
    with pytest.raises(UserError, match="svgd takes the heads of a member as its particles"):
        ensemble_of(MLP, objective=de.losses.categorical(3), methods=[de.methods.svgd()])
    number = de.losses.of_heads(de.losses.categorical(3), joint=lambda outputs, _: outputs.sum())
    summed = ensemble_of(MEMBERS["tabm"](), objective=number)
    with pytest.raises(UserError, match="joint returned .* for labels of the shape"):
        de.fit(summed, DATA, steps=1, progress=False)
    with pytest.raises(UserError, match="have 10 of them|do not divide into 4 heads"):
        de.models.packed((6,), 3, hidden_sizes=(5,), heads=4)
    wrong = de.as_member(
        init=lambda key, inputs: ({"w": jnp.ones((6, 3))}, ()),
        apply=lambda params, state, x, key, train: (x @ params["w"], state),
        heads=4,
    )
    with pytest.raises(UserError, match=r"has 4 heads, and returned \[16, 3\]"):
        de.fit(ensemble_of(wrong), DATA, steps=1, batch_size=16, progress=False)
