"""The tables that the command line prints, each from plain results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table


def presets(rows: Sequence[Any]) -> Group:
    """Return the presets (``verbs.PresetRow``) with their sizes."""
    table = _table("Presets", left=("preset", "encoder", "d", "heads"), right=_PRESET_COUNTS)
    for row in rows:
        config, count = row.config, row.parameters
        table.add_row(
            row.name,
            _pattern(row.mixers, config),
            str(config["d_model"]),
            f"{config['num_heads']}x{config['head_dim']}",
            f"{config['decoder_layers']} x" if "decoder_layers" in config else "-",
            *(_millions(sum(count.get(part, 0) for part in parts)) for parts in _PARTS),
            _millions(row.total),
            f"{row.megabytes(2):,.1f}",
        )
    legend = (
        "Encoder: layers x pattern, S softmax and L linear attention; of SinkRec T recurrence and A local attention, "
        "loops x the shared group, and its item table grows with the catalogue. Parameters in millions; exact with "
        "--json."
    )
    return Group(table, legend)


def _pattern(mixers: str, config: Mapping[str, Any]) -> str:
    if "group" in config:
        return f"{config['num_loops']} x {config['group']}"
    return f"{len(mixers)} x {config['layout'] if 'L' in mixers else 'S'}"


_PARTS = ("items",), ("encoder", "group", "memory"), ("decoder",)
_PRESET_COUNTS = ("decoder", "item table", "encoder", "decoder", "in all", "fp16 MB")


def bundle(found: Mapping[str, Any]) -> Group:
    """Return what ``verbs.inspect`` found: configuration, parts, files, engines."""
    config = ", ".join(f"{name} {value}" for name, value in found["config"].items())
    shown: list[Any] = [f"[bold]{escape(found['path'])}[/]", escape(config)]
    for part, signature in found["signatures"].items():
        table = _table(f"Part {part}", left=("", "tensor", "dtype", "shape", "meaning"))
        for direction in ("inputs", "outputs"):
            for tensor in signature[direction]:
                shape = " x ".join(str(dim) for dim in tensor["shape"])
                table.add_row(direction[:-1], tensor["name"], tensor["dtype"], shape, tensor["meaning"])
        shown.append(table)
    files = _table("Files", left=("file",), right=("MB", "sha256"))
    for name, record in found["files"].items():
        files.add_row(name, f"{record['size'] / 1e6:,.2f}", record["sha256"][:12])
    shown.append(files)
    if found["engines"]:
        shown.append(engines(found["engines"]))
    return Group(*shown)


def kernels(found: Mapping[str, Any]) -> Group:
    """Return what ``verbs.inspect_kernels`` found: the choice for each op and dtype, and the launch parameters."""
    sizes = found["sizes"]
    title = (
        f"Custom ops of {found['preset']} on {found['device']}: {sizes['channels']} channels, "
        f"{sizes['conv_width']} taps, heads of {sizes['head_dim']}"
    )
    chosen = _table(title, left=("op", "dtype", "implementation", "why"))
    launches = _table("Launch parameters", left=("op", "dtype", "kernel"), right=_LAUNCH_COLUMNS)
    for op in sorted(found["ops"], key=lambda op: op["op"]):
        chosen.add_row(op["op"], op["dtype"], op["implementation"], escape(op["reason"]))
        for launch in op["launches"]:
            launches.add_row(
                op["op"],
                op["dtype"],
                launch["kernel"],
                f"{launch['positions']} x {launch['channels']}",
                str(launch["warps"]),
                str(launch["stages"]),
                "yes" if launch["tma"] else "no",
                "-" if launch["resident"] is None else str(launch["resident"]),
            )
    if not launches.row_count:
        return Group(chosen, "Every op takes its reference, so nothing is launched.")
    legend = (
        "Tile: positions x channels. Stages: tiles in flight. TMA: tiles move through the tensor memory accelerator. "
        "Resident: programs at a time on a multiprocessor, from which the split of a row follows."
    )
    return Group(chosen, launches, legend)


_LAUNCH_COLUMNS = ("tile", "warps", "stages", "TMA", "resident")


def sink(found: Mapping[str, Any]) -> Group:
    """Return what ``verbs.inspect_sink`` found: the sink ratio of each model, and where the picture is."""
    title = f"Sink of user {found['user']} of {found['dataset']}: {found['events']:,} events"
    if found["left_out"]:
        title += f", the newest; {found['left_out']:,} older ones are beyond the models' limit"
    table = _table(escape(title), left=("model", "bundle"), right=("sink ratio",))
    for model in found["models"]:
        table.add_row(model["name"], escape(model["bundle"]), f"{model['ratio']:.3f}")
    legend = (
        f"Sink ratio: share of the influence of all writes that falls on those of code {found['code']}, the most "
        f"frequent memory code (of {found['codes_of']}), which {100 * found['code_share']:.1f}% of the events have."
    )
    return Group(table, escape(legend), f"Picture in [bold]{escape(found['picture'])}[/]")


def exported(parts: Sequence[Any]) -> Table:
    """Return the exported graphs (``export.OnnxPart``)."""
    table = _table("Exported graphs", left=("part", "dtype", "opset", "zoo nodes"), right=("MB", "seconds", ""))
    for part in parts:
        nodes = ", ".join(f"{count} {name}" for name, count in part.ops.items()) or "none"
        state = "up to date" if part.up_to_date else "written"
        table.add_row(
            part.part, part.dtype, str(part.opset), nodes, f"{part.size / 1e6:,.2f}", f"{part.seconds:.1f}", state
        )
    return table


def engines(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return the engines, from their records or manifests as JSON."""
    table = _table("Engines", left=("part", "dtype", "length", "target", "plugins"), right=("MB", "build s", ""))
    for record in records:
        plugins = ", ".join(f"{plugin['count']} {plugin['name']}" for plugin in record["plugins"]) or "none"
        table.add_row(
            record["part"],
            record["dtype"],
            "any" if record["length"] is None else str(record["length"]),
            str(record["target"]),
            plugins,
            f"{record['engine_size'] / 1e6:,.2f}",
            f"{record['build_seconds']:.1f}",
            record.get("status", ""),
        )
    return table


def demo(summary: Mapping[str, Any]) -> Group:
    """Return the summary of ``verbs.demo``: quality, stages with their seconds, paths."""
    stages = _table("Stages", left=("stage", "result"), right=("seconds",))
    seconds = summary["seconds"]
    parity = summary["parity"]
    verdict = "[green]all passed[/]" if summary["ok"] else f"[red]{len(parity['failed'])} failed[/]"
    results = {
        "data": f"{summary['dataset']['users']:,} users, {summary['dataset']['items']:,} items",
        "train": summary["paths"]["loss_curve"],
        "eval": "see below",
        "export": f"{len(summary['exported'])} graphs",
        "build": f"{len(summary['engines'])} engines",
        "validate": f"{parity['checks']} parity and contract checks: {verdict}",
    }
    for name, result in results.items():
        stages.add_row(name, result, f"{seconds[name]:.1f}")
    stages.add_row("[bold]in all[/]", summary["paths"]["bundle"], f"[bold]{seconds['total']:.1f}[/]")
    closing = [f"[dim]not run: {escape(line)}[/]" for line in parity["not_run"]]
    closing += [f"[red]failed: {escape(line)}[/]" for line in parity["failed"]]
    closing.append(
        f"{'All passed' if summary['ok'] else '[red]FAILED[/]'}; every check is in "
        f"{summary['paths']['parity_report']}, this summary in {summary['paths']['summary']}"
    )
    return Group(stages, quality(summary["quality"]), engines(summary["engines"]), *closing)


def quality(report: Mapping[str, Any]) -> Group:
    """Return an evaluation report's metrics, one line a recommender, and what is to be known about them."""
    rows: Mapping[str, Mapping[str, float]] = report["metrics"]
    names = list(next(iter(rows.values())))
    table = _table(f"Full ranking of {report['users']:,} users, {report['split']} split", left=("",), right=names)
    for recommender, metrics in rows.items():
        table.add_row(recommender, *(f"{metrics[name]:.4f}" for name in names))
    model, (low, high) = next(iter(report["recall10_interval"].items()))
    notes = f"95% interval of the model's Recall@10: {low:.4f} to {high:.4f}."
    if model == "gbla":
        notes += f" Without the trie, {report['illegal_share']:.1%} of the codes that it writes belong to no item."
    return Group(table, notes)


def _table(title: str, *, left: Sequence[str] = (), right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for column in left:
        table.add_column(column, overflow="fold")  # a name that was cut off could not be typed
    for column in right:
        table.add_column(column, justify="right")
    return table


def _millions(count: int) -> str:
    return f"{count / 1e6:,.2f}M"
