"""Shows what a config feeds to a network: dist-ens data --config=FILE [--pictures=FILE.png].

Of a table it shows each column: its type, values, share missing, what becomes of it, and whether it
alone predicts the target, which is a leak in most cases. Of other data it shows shapes and ranges.
Labels are counted. --pictures writes a grid of training examples that are pictures.
"""

import io

import numpy as np
from rich.table import Table

from dist_ens.data import Source, Split, parts_of
from dist_ens.data.overview import ColumnFacts, column_facts
from dist_ens.experiment.config_file import NO_FILE
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.terminal import PlainConsole, print_table
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_file

_PICTURES = define_file("pictures", None, ".png file for a grid of training examples.")
_CONFIG = ConfigFlags()
_GRID = 4, 8  # Rows and columns of pictures.
_MOST_CLASSES = 30  # Largest number of classes that are listed.
_MOST_EXAMPLES = 10_000  # Largest number of examples of which labels and ranges are shown.


def main() -> None:
    """Opens the data and prints what it holds."""
    cli.check_outputs(_PICTURES)
    config = _CONFIG.experiment().data
    source = (_CONFIG.file or NO_FILE).open_source(config)
    console, spec = PlainConsole(), source.spec
    console.print(f"{config.source}: {spec}.", soft_wrap=True)
    if spec.table is not None:
        facts = column_facts(config.source.partition(":")[2], spec.table)
        print_table(console, _columns(facts))
        for each in facts:
            if each.leak is not None:
                console.print(
                    f"{each.name!r} alone predicts the target of other rows (score "
                    f"{each.leak:.4f}): it may leak. Leave it out if it is not known before: "
                    f"--config.data.leave_out=\"('{each.name}',)\".",
                    soft_wrap=True,
                )
    print_table(console, _splits(source))
    if spec.num_classes is not None and spec.label_shape == ():
        print_table(console, _classes(source))
    if _PICTURES.value is not None:
        cli.write_file(_PICTURES, _grid(source))
        console.print(f"{quoted(_PICTURES.value)}: training examples.", soft_wrap=True)


def _columns(facts: list[ColumnFacts]) -> Table:
    table = Table("column", "type", "values", "different", "missing", "use")
    for each in facts:
        use = f"{each.use}; may leak" if each.leak is not None else each.use
        missing = f"{each.missing:.1%}" if each.missing else ""
        table.add_row(each.name, each.kind, each.values, f"{each.num_values:,}", missing, use)
    return table


def _some(split: Split, name: str) -> np.ndarray:
    """Returns a part of the examples, of at most 10,000 that are spread evenly."""
    rows = np.unique(np.linspace(0, len(split) - 1, _MOST_EXAMPLES).astype(int))
    of_all = parts_of(split, [name])[name] if split.in_memory else split.take(rows)[name]
    return of_all[rows] if split.in_memory else of_all


def _all_labels(split: Split) -> np.ndarray:
    """Returns the labels of all examples in memory, and of some others."""
    return parts_of(split, ["labels"])["labels"] if split.in_memory else _some(split, "labels")


def _splits(source: Source) -> Table:
    table = Table("split", "examples", "inputs", "labels")
    for name, split in _named(source).items():
        inputs, labels = _some(split, "inputs"), _some(split, "labels")
        part = "" if len(split) <= _MOST_EXAMPLES else f" in {len(inputs):,} of them"
        table.add_row(name, f"{len(split):,}", _range(inputs) + part, _range(labels) + part)
    return table


def _named(source: Source) -> dict[str, Split]:
    """Returns the splits that a source has, by name."""
    splits = {"train": source.train, "valid": source.valid, "test": source.test}
    return {name: split for name, split in splits.items() if split is not None}


def _range(values: np.ndarray) -> str:
    return f"{values.dtype}{list(values.shape[1:])}, {values.min():.4g} to {values.max():.4g}"


def _classes(source: Source) -> Table:
    """Returns how many examples of each class the splits have."""
    count = source.spec.num_classes or 0
    counts = {
        name: np.bincount(_all_labels(split).ravel(), minlength=count)
        for name, split in _named(source).items()
    }
    table = Table("class", *counts)
    names = source.spec.class_names or tuple(map(str, range(count)))
    for number, name in enumerate(names[:_MOST_CLASSES]):
        table.add_row(name, *(f"{of_split[number]:,}" for of_split in counts.values()))
    if count > _MOST_CLASSES:
        table.add_row(f"… {counted(count - _MOST_CLASSES, 'more class')}")
    return table


def _grid(source: Source) -> bytes:
    """Returns a grid of the first training examples, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shape = source.spec.input_shape
    if len(shape) not in (2, 3):
        raise UserError(f"Inputs of the shape {list(shape)} are no pictures. Leave out --pictures.")
    rows, columns = _GRID
    examples = source.train.take(np.arange(min(rows * columns, len(source.train))))
    figure, axes = pyplot.subplots(rows, columns, figsize=(columns, rows * 1.2))
    for axis in axes.ravel():
        axis.axis("off")
    for axis, picture, label in zip(
        axes.ravel(), examples["inputs"], examples["labels"], strict=False
    ):
        values = picture if picture.ndim == 2 or picture.shape[-1] == 3 else picture.mean(axis=-1)
        is_float = values.ndim == 3 and values.dtype.kind == "f"
        axis.imshow(values / values.max() if is_float else values, cmap="gray")
        names = source.spec.class_names
        shown = names[label] if names and label.ndim == 0 else np.array2string(label, precision=4)
        axis.set_title(shown, fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


run = cli.command(main, _CONFIG.prepare, joins_cluster=lambda: False)

if __name__ == "__main__":
    run()
