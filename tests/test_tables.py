"""Tables of a user's: the rule that training rows decide, splits, embeddings, and the commands."""

import csv
import datetime
import decimal
import json
import re
import warnings

import jax
import jax.export
import numpy as np
import optax
import pandas as pd
import polars as pl
import pytest

import dist_ens as de
from commands import dist_ens
from dist_ens.data import Spec, parts_of, table
from dist_ens.data.overview import column_facts
from dist_ens.ground.errors import UserError
from dist_ens.training.evaluating import with_validation


def run_command(*words, code=0):
    """A command that ends with an exit code."""
    ended = dist_ens(*words)
    assert ended.returncode == code, ended.stderr
    return ended


def passengers(count=400, seed=0):
    """Returns a table with numbers, categories, missing values, a constant and a leaking column."""
    draw = np.random.default_rng(seed)
    sex = draw.choice(["female", "male"], count)
    age = draw.normal(30, 10, count).round(1)
    survived = (draw.random(count) < np.where(sex == "female", 0.8, 0.2)).astype(int)
    return pl.DataFrame(
        {
            "id": [f"p{number}" for number in range(count)],
            "sex": sex,
            "age": [None if draw.random() < 0.2 else value for value in age],
            "port": draw.choice(["S", "C", None], count),
            "ship": ["Titanic"] * count,
            "boat": np.where(survived == 1, draw.integers(1, 9, count), 0),
            "survived": survived,
        }
    )


def test_numbers_are_standardised_by_the_training_rows_with_the_median_for_missing_ones():
    rows = {"a": [1.0, None, 3.0, 8.0, 100.0], "y": [0.1, 0.2, 0.3, 0.4, 0.5], "t": [0, 0, 0, 0, 1]}
    source = table(rows, target="y", test="t")
    # The median of 1, 3, 8 is 3: 1, 3, 3, 8 have the mean 3.75 and the variance 6.6875.
    std = 6.6875**0.5
    expected = [[-2.75 / std, 0], [-0.75 / std, 1], [-0.75 / std, 0], [4.25 / std, 0]]
    np.testing.assert_allclose(source.train.inputs, expected, rtol=1e-6)
    np.testing.assert_allclose(source.test.inputs, [[96.25 / std, 0]], rtol=1e-6)
    assert source.spec.table.input_names == ["a", "a is missing"]


def test_a_category_that_training_never_saw_is_none_of_the_others_and_is_told():
    rows = {"c": ["x", "y", None, "x"], "y": [1.5, 2.5, 3.5, 4.5], "t": [0, 0, 0, 1]}
    source = table(rows, target="y", test="t")
    assert source.spec.table.input_names == ["c=missing", "c=x", "c=y"]
    with pytest.warns(UserWarning, match=r"never saw these categories of 'c': 'z'\. They count"):
        encoded = source.spec.table.encode({"c": ["z", "x"]})
    assert encoded.sum(axis=1).tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["pandas", "polars", "csv", "semicolons", "parquet"])
def test_every_form_of_a_table_is_the_same_data(kind, tmp_path):
    frame = passengers()
    expected = table(frame, target="survived", leave_out=["id"])
    path = tmp_path / ("t.parquet" if kind == "parquet" else "t.csv")
    forms = {
        "pandas": lambda: pd.DataFrame(frame.to_dict(as_series=False)),
        "polars": lambda: frame,
        "csv": lambda: frame.write_csv(path),
        "semicolons": lambda: frame.write_csv(path, separator=";"),
        "parquet": lambda: frame.write_parquet(path),
    }
    made = forms[kind]()
    source = table(path if made is None else made, target="survived", leave_out=["id"])
    assert source.spec == expected.spec
    np.testing.assert_array_equal(source.train.inputs, expected.train.inputs)
    np.testing.assert_array_equal(source.test.labels, expected.test.labels)
    assert Spec.from_dict(json.loads(json.dumps(source.spec.to_dict()))) == source.spec


def test_numbers_with_a_decimal_comma_are_numbers(tmp_path):
    lines = ["size;town;price", *(f"{n},5;t,own{n % 2};-{n},25" for n in range(30))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    source = table(tmp_path / "t.csv", target="price", test=0.2)
    assert source.spec.table.input_names == ["size", "town=t,own0", "town=t,own1"]
    assert source.spec.num_classes is None
    assert source.train.labels[0] % 1 == 0.75  # -n.25


def test_a_row_is_encoded_alike_whatever_rows_stand_beside_it(tmp_path):
    lines = ["insured,code,x,y"]
    lines += [
        f"{('true', 'false', 'unknown')[n % 3]},{('01067', '04109', 'A1')[n % 3]},{n},{n}.5"
        for n in range(30)
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    (tmp_path / "one.csv").write_text("\n".join([lines[0], lines[1]]))
    (tmp_path / "two.csv").write_text("\n".join([lines[0], lines[1], lines[3]]))
    rule = table(tmp_path / "t.csv", target="y").spec.table
    one, two = (rule.encode(tmp_path / name) for name in ("one.csv", "two.csv"))
    np.testing.assert_array_equal(one[0], two[0])
    assert one[0].sum() > 0
    by_frame = rule.encode({"insured": ["true"], "code": ["01067"], "x": [0]})
    np.testing.assert_array_equal(one, by_frame)


def test_classes_are_the_text_of_the_file_also_of_a_second_file(tmp_path):
    lines = ["x,y", *(f"{n},{('01', '02', '10')[n % 3]}" for n in range(30))]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    (tmp_path / "test.csv").write_text("x,y\n1,01\n2,02")
    source = table(tmp_path / "train.csv", target="y", test=tmp_path / "test.csv")
    assert source.spec.class_names == ("01", "02", "10")
    assert source.test.labels.tolist() == [0, 1]


def test_ids_of_rows_are_the_text_of_the_file(tmp_path):
    lines = ["id,x,y", *(f"0{n},{n},{n}.5" for n in range(30))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    rule = table(tmp_path / "t.csv", target="y", row_id="id").spec.table
    assert rule.row_ids(tmp_path / "t.csv")[1][:2].tolist() == ["00", "01"]
    assert rule.row_ids({"id": ["7.0", "True", None]})[1].tolist() == ["7.0", "True", ""]
    assert rule.row_ids({"x": [1, 2]})[0] == "row"
    # As numbers, the groups 0 and 00 would be one.
    lines = ["who,x,y", *(f"{'0' * (1 + n % 2)},{n},{n}.5" for n in range(30))]
    (tmp_path / "g.csv").write_text("\n".join(lines))
    assert len(table(tmp_path / "g.csv", target="y", group="who", test=0.5).test) == 15


def test_missing_values_of_pandas_are_missing():
    count = 40
    frame = pd.DataFrame(
        {
            "when": pd.to_datetime(["2020-01-01", None, "2020-03-01", "2020-04-01"] * 10),
            "whole": pd.array([1, None, 3, 4] * 10, "Int64"),
            "truth": pd.array([True, None, False, True] * 10, "boolean"),
            "mixed": [True, None, False, True] * 10,
            "text": pd.array(["a", None, "b", "a"] * 10, "string"),
            "took": pd.to_timedelta([1.0, None, 3.0, 4.0] * 10, "D"),
            "y": np.arange(count) * 0.5,
        }
    )
    source = table(frame, target="y")
    missing = [f"{name} is missing" for name in ("when", "whole", "truth", "mixed", "took")]
    names = source.spec.table.input_names
    assert {*missing, "text=missing"} <= {*names}
    encoded = source.spec.table.encode(frame)
    for name in missing:
        assert encoded[:, names.index(name)].tolist() == [0, 1, 0, 0] * 10
    # 2020-03-01 and 2020-04-01 are 31 days apart.
    days = source.spec.table.numbers(frame)[:, 0]
    assert days[3] - days[2] == 31
    as_text = frame.assign(when=frame["when"].dt.strftime("%Y-%m-%d"))
    np.testing.assert_array_equal(source.spec.table.encode(as_text), encoded)


def test_a_date_that_could_be_two_days_is_text(tmp_path):
    lines = ["when,iso,y", *(f"0{n % 9 + 1}/04/2000,2000-0{n % 9 + 1}-04,{n}.5" for n in range(40))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    facts = column_facts(tmp_path / "t.csv", table(tmp_path / "t.csv", target="y").spec.table)
    assert [each.kind for each in facts] == ["text", "dates", "numbers"]


def test_times_with_an_offset_are_those_of_utc_in_every_form_of_a_table(tmp_path):
    when = pd.Timestamp("2024-01-01", tz="Asia/Tokyo") + pd.to_timedelta(np.arange(40), unit="h")
    rows = pd.DataFrame({"when": [each.isoformat() for each in when], "y": np.arange(40) / 7})
    rows.to_csv(tmp_path / "t.csv", index=False)
    rule = table(tmp_path / "t.csv", target="y").spec.table
    days = 19722 + (np.arange(40) + 15) / 24  # Midnight in Tokyo is 15 o'clock the day before.
    times = rows.assign(when=when)
    forms = (tmp_path / "t.csv", rows, times, times.assign(when=when.tz_convert("Europe/Berlin")))
    for form in (*forms, pl.from_pandas(times)):
        np.testing.assert_allclose(rule.numbers(form).ravel(), days, rtol=1e-12)


@pytest.mark.parametrize(
    "wrong",
    ["2020-02-30", "0000-00-00", "2020-01-01 25:00:00", "2020-01-01 10:00 or later"],
)
def test_a_date_that_does_not_exist_makes_its_column_text_and_is_told(tmp_path, wrong):
    file, right = tmp_path / "t.csv", "2020-01-01" if len(wrong) == 10 else "2020-01-01 10:00:00"
    rows = pl.DataFrame(
        {"when": [wrong] * 3 + [right] * 37, "x": range(40), "y": np.arange(40) / 7}
    )
    rows.write_csv(file)
    with pytest.warns(UserWarning, match=f"'when' is text, since row 0 has '{wrong}'"):
        rule = table(file, target="y").spec.table
    assert rule.input_names == [f"when={each}" for each in sorted((wrong, right))] + ["x"]
    assert table(file, target="y", leave_out=["when"]).spec.table.input_names == ["x"]


def test_empty_lines_at_the_end_of_a_file_are_no_rows(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n,\n3,\n\n,\n\n")
    rule = table({"a": [1.0, 2, 3, 4, 5], "b": [0.5, 1.5, 2.5, 3.5, 4.5]}, target="b").spec.table
    np.testing.assert_array_equal(rule.numbers(tmp_path / "t.csv").ravel(), [1, np.nan, 3])


@pytest.mark.parametrize(
    ("first", "second", "numbers"),
    [
        (None, 2.5, [np.nan, 2.5]),
        (3, 2**40, [3, 2**40]),
        (decimal.Decimal("1.25"), None, [1.25, np.nan]),
        (datetime.date(1970, 1, 3), datetime.date(1970, 1, 1), [2, 0]),
        (datetime.timedelta(hours=6), None, [0.25, np.nan]),
        (True, None, [1, np.nan]),
    ],
)
def test_objects_of_pandas_that_are_numbers_count_as_numbers(first, second, numbers):
    objects = pd.Series([first, second] * 20, dtype=object)
    rows = pd.DataFrame({"x": objects, "n": np.arange(40.0), "y": np.arange(40) / 7})
    rule = table(rows, target="y").spec.table
    assert rule.columns[0].name == "x"
    np.testing.assert_array_equal(rule.numbers(rows)[:2, 0], numbers)
    prices = [decimal.Decimal(n % 20) / 4 for n in range(40)]
    assert table(rows.assign(y=prices), target="y").spec.num_classes is None


@pytest.mark.parametrize("standardize", [False, True])
def test_a_run_made_in_python_keeps_the_rule_of_its_table(tmp_path, standardize):
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({"size": draw.uniform(20, 200, 300), "town": ["Kiel", "Bonn", "Ulm"] * 100})
    rows["price"] = 3 * rows["size"] + 50 + draw.normal(0, 10, 300)
    source = table(rows, target="price", standardize=standardize)
    objective = de.losses.gaussian(standardize=not standardize)
    network = de.models.mlp(source.spec.input_shape, 2, hidden_sizes=(16,))
    ensemble = de.Ensemble(network, optax.adam(1e-2), objective, num_members=2)
    saved = de.Checkpoints(tmp_path / "run")
    result = de.fit(ensemble, source, steps=200, checkpoints=saved, progress=False)
    run = de.load(tmp_path / "run", ensemble=ensemble)
    prediction = run.predict(rows)
    errors = np.asarray(prediction.mean) - rows["price"]
    assert errors.std() < 20
    expected = de.evaluate(ensemble, result.state, source).ensemble["rmse"]
    assert run.evaluate(source).ensemble["rmse"] == pytest.approx(expected, rel=1e-5)
    of_rows = run.evaluate(rows).ensemble["rmse"]
    assert of_rows == pytest.approx(np.sqrt(np.square(errors).mean()), rel=1e-3)
    exported = run.export(tmp_path / "m.jaxexport", platforms="cpu")
    numbers = source.spec.table.numbers(rows[:7]).astype(np.float32)
    found = jax.export.deserialize(bytearray(exported.content)).call(numbers)
    np.testing.assert_allclose(found["mean"], prediction.mean[:7], rtol=1e-5)
    with pytest.raises(UserError, match="The table is an array"):
        run.predict(np.zeros((3, 4)))


def test_an_empty_table_infinity_and_a_missing_target_are_told_with_their_row():
    rule = table(passengers(), target="survived", row_id="id").spec.table
    with pytest.raises(UserError, match="The table has no rows"):
        rule.encode(passengers()[:0])
    with pytest.raises(UserError, match="'age' has infinity in row 0"):
        rule.encode(passengers()[:2].with_columns(age=pl.lit(np.inf)))
    for value, told in ((np.inf, "infinity in row 3"), (1.7e308, r"numbers of up to 1.7e\+308")):
        odd = [1.5, 2.5, 3.5, value, *np.arange(16) / 7]
        with pytest.raises(UserError, match=f"The column 'x' has {told}"):
            table({"x": odd, "y": np.arange(20) / 7}, target="y")
        with pytest.raises(UserError, match=f"The target 'y' has {told}"):
            table({"x": np.arange(20) / 7, "y": odd}, target="y", standardize=True)
    prices = [1.5] * 37 + [None] + [2.5] * 22
    with pytest.raises(UserError, match="missing in 1 of 60 rows, the first in row 37"):
        table({"x": np.arange(60.0), "y": prices}, target="y")


def test_what_a_target_holds_decides_between_classes_and_numbers():
    count = 60
    columns = {"x": np.arange(count, dtype=float)}
    for values, classes in (
        (np.arange(count) % 3, 3),
        (np.arange(count), None),
        (np.arange(count) % 3 + 0.5, None),
        (np.array(["a", "b"] * 30), 2),
        (np.arange(count) % 2 == 0, 2),
    ):
        assert table({**columns, "y": values}, target="y").spec.num_classes == classes
    forced = table({**columns, "y": np.arange(count) % 3}, target="y", task="regression")
    assert forced.spec.num_classes is None
    assert table({**columns, "y": np.arange(count) % 2 * 5}, target="y").spec.class_names == (
        "0",
        "5",
    )


def labels_of(split):
    return parts_of(split, ["labels"])["labels"]


def test_rows_of_a_group_stay_together_and_those_of_the_last_time_are_the_test_rows():
    count = 100
    rows = {
        "x": np.arange(count, dtype=float),
        "who": [f"w{number % 10}" for number in range(count)],
        "day": np.arange(count)[::-1],
        "y": np.arange(count) * 0.5,
    }
    by_group = table(rows, target="y", group="who", test=0.3)
    groups = [{int(y * 2) % 10 for y in part.labels} for part in (by_group.train, by_group.test)]
    assert len(groups[1]) == 3
    assert not groups[0] & groups[1]
    by_time = table(rows, target="y", time="day", test=0.3)
    # The last 30 days are the first 30 rows.
    assert sorted(by_time.test.labels.tolist()) == [0.5 * number for number in range(30)]
    # What is held out for validation is whole groups, or the last of the other rows.
    held_out = by_group.with_validation(0.3).with_validation(0.4)
    parts = [np.unique(labels_of(part) * 2 % 10) for part in (held_out.train, held_out.valid)]
    assert [len(part) for part in parts] == [3, 2]
    assert not {*parts[0]} & {*parts[1]}
    _, examples = with_validation(by_time, 0.1)
    assert sorted(labels_of(examples.split)) == [0.5 * number for number in range(30, 37)]
    with pytest.raises(UserError, match="validation=0.05 holds out 0 of 70 training examples"):
        by_group.with_validation(0.05)
    second = table(rows, target="y", test={name: values[:7] for name, values in rows.items()})
    assert (len(second.train), len(second.test)) == (100, 7)


def test_a_share_of_each_class_is_test_rows():
    rows = {"x": np.arange(100.0), "y": ["rare"] * 10 + ["common"] * 90}
    assert np.bincount(table(rows, target="y", test=0.2).test.labels).tolist() == [18, 2]


def test_many_categories_are_numbers_that_an_embedding_reads():
    draw = np.random.default_rng(0)
    town = draw.integers(0, 40, 2000)
    effect = draw.normal(size=40)
    rows = {
        "town": [f"t{number:02}" for number in town],
        "x": draw.normal(size=2000),
        "y": effect[town] + 0.01 * draw.normal(size=2000),
    }
    source = table(rows, target="y")
    assert source.spec.table.embedded == (40,)
    assert source.spec.table.input_names == ["x", "town"]
    mlp = de.models.mlp((1 + 20,), 2, hidden_sizes=(32,))
    member = de.models.with_embeddings(mlp, source.spec.table.embedded)
    ensemble = de.Ensemble(member, optax.adam(1e-2), de.losses.gaussian(), num_members=2)
    result = de.fit(ensemble, source, steps=600, progress=False)
    scores = de.evaluate(ensemble, result.state, source, intervals=False)
    assert scores.ensemble["rmse"] < 0.2 * effect.std()
    vectors = result.state.params["embeddings"][0]
    assert vectors.shape == (2, 41, 20)
    # Training never reads the vector of an unknown category.
    assert not np.asarray(vectors)[:, 40].any()
    with pytest.warns(UserWarning, match="'t99'"):
        unknown = source.spec.table.encode({"town": ["t99"], "x": [0.0]}).astype(np.float32)
    assert np.isfinite(ensemble.predict(result.state, unknown).mean).all()


def test_facts_name_the_constant_and_the_leaking_column():
    frame = passengers()
    source = table(frame, target="survived", row_id="id")
    facts = {each.name: each for each in column_facts(frame, source.spec.table)}
    assert facts["ship"].use == "left out: constant"
    assert facts["boat"].leak == 1.0
    assert [name for name, each in facts.items() if each.leak is not None] == ["boat"]
    assert facts["age"].missing == np.mean([each is None for each in frame["age"]])
    assert facts["sex"].use == "2 categories"


def test_one_command_each_leads_from_a_csv_file_to_predictions_of_another(tmp_path):
    frame = passengers(700)
    frame[:500].write_csv(tmp_path / "train.csv")
    frame[500:].drop("survived", "ship").write_csv(tmp_path / "new.csv")
    flags = [
        "--config=configs/table.py",
        f"--config.data.source=csv:{tmp_path}/train.csv",
        "--config.data.target=survived",
        "--config.data.row_id=id",
    ]
    shown = run_command("data", *flags)
    assert "'boat' alone predicts the target" in shown.stdout
    assert re.search(r"ship .* left out: constant", shown.stdout)
    run = tmp_path / "run"
    run_command(
        "train",
        *flags,
        "--config.data.leave_out=('boat',)",
        "--config.steps=200",
        f"--workdir={run}",
    )
    run_command(
        "predict", f"--workdir={run}", f"--input={tmp_path}/new.csv", f"--output={tmp_path}/p.csv"
    )
    with open(tmp_path / "p.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == frame["id"][500:].to_list()
    probs = np.array([[float(row[f"probs_{c}"]) for c in (0, 1)] for row in rows])
    np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-5)
    right = np.array([int(row["prediction"]) for row in rows]) == frame["survived"][500:].to_numpy()
    assert right.mean() > 0.7  # 0.8 is the best that the sex allows.
    loaded = de.load(run)
    np.testing.assert_allclose(loaded.predict(frame[500:]).mean, probs, rtol=1e-5)
    accuracy = loaded.evaluate(frame[500:], intervals=False).ensemble["accuracy"]
    assert accuracy == pytest.approx(right.mean())


def test_a_regression_from_a_config_predicts_in_the_unit_of_the_table(tmp_path):
    draw = np.random.default_rng(0)
    size = draw.uniform(20, 200, 600)
    frame = pl.DataFrame({"size": size, "price": 3000 * size + draw.normal(0, 5000, 600) + 1e5})
    frame.write_parquet(tmp_path / "t.parquet")
    run_command(
        "train",
        "--config=configs/table.py",
        f"--config.data.source=parquet:{tmp_path}/t.parquet",
        "--config.data.target=price",
        f"--workdir={tmp_path}/run",
    )
    prediction = de.load(tmp_path / "run").predict({"size": [100.0]})
    assert float(prediction.mean[0]) == pytest.approx(4e5, rel=0.02)
    assert float(prediction.total[0]) ** 0.5 == pytest.approx(5000, rel=0.3)


def test_an_exported_prediction_encodes_the_numbers_of_the_columns(tmp_path):
    frame = passengers(500).with_columns(
        town=pl.Series([f"t{n % 37:02}" for n in range(500)]),  # An embedding reads it.
        when=pl.datetime_range(pl.datetime(2020, 1, 1), pl.datetime(2021, 5, 14), eager=True),
    )
    frame.write_csv(tmp_path / "t.csv")
    run_command(
        "train",
        "--config=configs/table.py",
        f"--config.data.source=csv:{tmp_path}/t.csv",
        "--config.data.target=survived",
        "--config.data.leave_out=('boat','id')",
        "--config.data.validation=0.2",
        "--config.steps=100",
        f"--workdir={tmp_path}/run",
    )
    run_command("evaluate", f"--workdir={tmp_path}/run", "--conformal=aps")
    run = de.load(tmp_path / "run")
    assert run.run.spec.table.embedded == (37,)
    exported = run.export(tmp_path / "m.jaxexport", conformal=0.8)
    assert [each["name"] for each in exported.description["columns"]][-1] == "town"
    new = frame[:50].with_columns(sex=pl.Series(["unknown"] + ["male"] * 49))
    numbers = run.run.spec.table.numbers(new).astype(np.float32)
    file = (tmp_path / "m.jaxexport").read_bytes()
    found = jax.export.deserialize(bytearray(file)).call(numbers)
    expected = run.predict(new, conformal=0.8)
    np.testing.assert_allclose(found["mean"], expected.mean, atol=1e-5)
    np.testing.assert_array_equal(found["sets"], expected.sets)
    assert np.isnan(numbers).sum() > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target": "survivd"}, "has no column 'survivd'. Did you mean 'survived'?"),
        (
            {"target": "sex", "task": "regression"},
            "'sex' has 'male' in row 0, .* A regression takes numbers",
        ),
        ({"target": "age"}, "The target 'age' is missing in .* rows"),
        ({"target": "survived", "test": 0.0}, r"test must lie in \(0, 1\): got 0.0"),
        ({"target": "survived", "test": 0.001}, "the largest of the 2 classes of 'survived' has"),
        ({"target": "survived", "test": "splt"}, "The table 'splt' cannot be read"),
    ],
)
def test_a_table_that_cannot_be_used_is_told_in_a_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        table(passengers(), **options)


def test_a_new_table_without_a_column_or_with_text_for_a_number_is_refused():
    rule = table(passengers(), target="survived", row_id="id").spec.table
    with pytest.raises(UserError, match=r"The table lacks 'age', which training had\."):
        rule.encode(passengers().drop("age"))
    with pytest.raises(UserError, match="'age' has 'old' in row 0, and a number"):
        rule.encode(passengers().with_columns(age=pl.lit("old")))
    with pytest.raises(UserError, match="no column 'survived', the target"):
        rule.labels(passengers().drop("survived"))


def test_a_column_without_any_value_is_left_out():
    rule = table(passengers().with_columns(cabin=pl.lit(None)), target="survived").spec.table
    assert dict(rule.left_out)["cabin"] == "all its values are missing"
    assert "cabin" not in rule.input_names


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "narwhals", None)
    with pytest.raises(UserError, match=r"pip install 'dist-ens\[tables\]'"):
        table({"x": [1.0], "y": [2.0]}, target="y")


def test_a_method_that_changes_inputs_is_refused_beside_numbers_of_categories(tmp_path):
    rows = pl.DataFrame({"c": [f"c{n % 40}" for n in range(200)], "y": np.arange(200) * 0.1})
    rows.write_csv(tmp_path / "t.csv")
    refused = run_command(
        "train",
        "--config=configs/table.py",
        f"--config.data.source=csv:{tmp_path}/t.csv",
        "--config.data.target=y",
        "--config.loss.mixup=0.2",
        f"--workdir={tmp_path}/run",
        code=2,
    )
    assert "loss.mixup would change the numbers of categories" in refused.stderr


def test_a_field_of_tables_has_no_effect_on_another_source():
    refused = run_command(
        "data", "--config=configs/digits.py", "--config.data.target=price", code=2
    )
    assert "data.target='price' has no effect on 'digits'" in refused.stderr


def test_pictures_are_shown_as_a_grid(tmp_path):
    run_command("data", "--config=configs/digits.py", f"--pictures={tmp_path}/grid.png")
    from PIL import Image

    assert Image.open(tmp_path / "grid.png").size[0] > 1000


def test_texts_of_a_csv_file_are_the_numbers_that_people_mean(tmp_path):
    def typed(content, **options):
        (file := tmp_path / "t.csv").write_text(content)
        return table(file, target="y", test=0.25, **options).spec.table

    rows = range(24)
    # With semicolons, 1,5 is a number beside 2. With commas, "1,037" is different in two countries.
    rule = typed("a;y\n" + "".join(f"{i // 2}{',5' if i % 2 else ''};{i}\n" for i in rows))
    assert rule.columns[0].categories is None
    (tmp_path / "new.csv").write_text("a;b\n1,5;0\n2;0\n")
    assert rule.numbers(tmp_path / "new.csv").ravel().tolist() == [1.5, 2]
    assert typed("a\ty\n" + "".join(f"1,00{i % 9}\t{i}\n" for i in rows)).columns[0].categories
    with pytest.raises(UserError, match="'y' has '1,000' in row 0, .* A regression takes"):
        typed("a,y\n" + "".join(f'{i},"1,{i:03}"\n' for i in rows), task="regression")
    # A code with zeros in front is no number.
    rule = typed("zip,y\n" + "".join(f"0{1000 + i % 3},{i / 7}\n" for i in rows))
    assert rule.columns[0].categories == ("01000", "01001", "01002")
    with pytest.warns(UserWarning, match=r"It saw '01000', '01001', '01002'"):
        rule.encode({"zip": [1000, 1001]})
    # Among numbers of several lengths, 007 is 7.
    rule = typed("x,y\n" + "".join(f"{i * i if i != 3 else '007'},{i / 7}\n" for i in rows))
    assert rule.columns[0].categories is None
    minutes = typed("x,y\n" + "".join(f"{i},{i:02}\n" for i in rows), task="regression")
    assert not minutes.has_classes
    # What pandas writes as 1.0 beside a missing value is the category 1.
    rule = typed("k,y\n" + "".join(f"{i % 3}.0,{i / 7}\n" for i in rows), categories=["k"])
    assert rule.columns[0].categories == ("0", "1", "2")
    assert rule.encode(pd.DataFrame({"k": [1.0, 2.0]})).tolist() == [[0, 1, 0], [0, 0, 1]]
    # Names of single rows are no categories in a small table either.
    rule = typed("name,x,y\n" + "".join(f"n{i},{i},{i / 7}\n" for i in rows))
    assert dict(rule.left_out)["name"] == "text with 18 different values"


def test_a_value_that_is_no_number_among_numbers_is_told():
    rows = {"a": [*map(str, range(20)), "about 50"], "y": np.arange(21) / 7, "c": [*"ab1"] * 7}
    with pytest.warns(UserWarning, match="'a' is text, since row 20 has 'about 50': 20 of its 21"):
        table(rows, target="y")
    with warnings.catch_warnings(action="error"):
        table(rows, target="y", categories=["a"])
    # A target with a slip would be classes.
    with pytest.warns(UserWarning, match="'a' is text, since row 20"), pytest.raises(UserError):
        table(rows, target="a")


def test_dates_in_several_forms_and_numbers_that_no_float_holds_are_told():
    times = [f"2024-01-02 10:00:{n:02}{'+01:00' if n % 2 else ''}" for n in range(40)]
    rows = {"when": times, "x": np.arange(40.0), "y": np.arange(40) / 7}
    with pytest.warns(UserWarning, match="'when' is text, although all its values are dates"):
        table(rows, target="y")
    with pytest.warns(UserWarning, match="row 0 has '0001-01-01T00:00:00"):
        table(rows | {"when": ["0001-01-01T00:00:00+09:00", *["2024-01-02"] * 39]}, target="y")
    objects = pd.Series([10**400, *range(39)], dtype=object)
    with pytest.raises(UserError, match="'x' has '1000.* in row 0, and a number"):
        table(pd.DataFrame(rows).assign(when=0, x=objects), target="y")


def test_one_number_that_is_computed_in_two_ways_is_constant():
    rows = {"a": [0.3, 0.1 + 0.2] * 10, "x": np.arange(20.0), "y": np.arange(20.0)}
    assert dict(table(rows, target="y").spec.table.left_out) == {"a": "constant"}


def test_rows_of_a_group_are_not_test_rows_by_a_column_of_splits():
    rows = {"x": np.arange(8.0), "y": np.arange(8) / 3, "who": [*"aabbccdd"], "s": [0, 1] * 4}
    with pytest.raises(UserError, match="4 groups of 'who' have training rows and test rows, such"):
        table(rows, target="y", group="who", test="s")
    for kind in (pd.DataFrame, pl.DataFrame, dict):
        others = kind({"x": [1.0], "y": [2.0], "who": ["e"], "s": [1]})
        assert len(table(kind(rows), target="y", group="who", test=others).test) == 1
    rows["s"] = [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(table(rows, target="y", group="who", test="s").test) == 4
    with pytest.raises(UserError, match=r"test must lie in \(0, 1\): got 20"):
        table(rows, target="y", time="x", test=20)


def test_a_column_of_names_is_kept_beside_a_prediction_of_the_same_name(tmp_path):
    rows = {"mean": [f"n{i}" for i in range(60)], "x": np.arange(60.0), "y": np.arange(60) / 7}
    pl.DataFrame(rows).write_csv(tmp_path / "t.csv")
    run_command(
        "train",
        "--config=configs/table.py",
        f"--config.data.source=csv:{tmp_path}/t.csv",
        "--config.data.target=y",
        "--config.data.row_id=mean",
        "--config.data.global_batch_size=16",
        "--config.steps=2",
        f"--workdir={tmp_path}/run",
    )
    words = f"--workdir={tmp_path}/run", f"--input={tmp_path}/t.csv", f"--output={tmp_path}/p.csv"
    run_command("predict", *words)
    found = pl.read_csv(tmp_path / "p.csv")
    assert found.columns == ["mean", "variance", "predicted_mean"]
    assert found["mean"].to_list() == rows["mean"]


def test_a_run_on_a_table_with_a_loss_function_predicts_tables_too(tmp_path):
    rows = pd.DataFrame({"x": np.arange(40.0), "y": np.arange(40) / 7})
    source = table(rows, target="y")

    def loss(params, model_state, batch, key):
        error = batch["inputs"] @ params["w"] - batch["labels"]
        return (error**2).mean(), (model_state, {})

    network = (
        lambda key: {"w": np.ones(1, np.float32)},
        lambda params, inputs: inputs @ params["w"],
    )
    ensemble = de.Ensemble(network, optax.sgd(0.1), loss, num_members=2)
    de.fit(ensemble, source, steps=2, checkpoints=de.Checkpoints(tmp_path), progress=False)
    run = de.load(tmp_path, ensemble=ensemble)
    inputs = source.spec.table.encode(rows).astype(np.float32)
    expected = ensemble.predict(run.state, inputs).mean
    np.testing.assert_array_equal(run.predict(rows).mean, expected)
