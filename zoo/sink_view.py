"""``zoo inspect sink``: what the writes of one history do to a model's readouts, beside those of another model, drawn.

The numbers are those of ``zoo.models.sink``; here a history is chosen, and a picture made of what was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoo import files
from zoo.bundle import SEMANTIC_IDS, Bundle
from zoo.data import Dataset, load_dataset
from zoo.errors import BundleError, ConfigError, DataError
from zoo.models.loading import load_model
from zoo.models.sink import MOST_POSITIONS, Sink, sink
from zoo.models.sinkrec import SinkRec
from zoo.training.batches import timed_histories

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "reports/sink.png"

_INK = "#7d8590"
"""A grey that reads on white and on black, since the background is transparent."""
_MOST_FREQUENT = "#e07a3f"
_NEXT_FREQUENT = ("#2f9e77", "#8f7ad1", "#b98a2f", "#4c8dc9")
_LARGEST_DOT = 3.5
"""Points."""


class Panel(NamedTuple):
    """One model's part of the picture: what it is called, and what was found."""

    label: str
    found: Sink


@dataclass(frozen=True)
class ModelSink:
    """What one model's writes do.

    Attributes:
        bundle: its folder.
        name: preset, and twin where it is one.
        ratio: share of the influence that falls on the most frequent code, 0 to 1.
        influence: of the write at each event, on its own and all later readouts, over heads, layers and loops.
    """

    bundle: str
    name: str
    ratio: float
    influence: list[float]


@dataclass(frozen=True)
class SinkReport:
    """One history through one or two models.

    Attributes:
        dataset: name of the data.
        user: what the source calls the user.
        events: events read, the newest before the user's test target.
        left_out: older ones that the models' limit leaves out.
        items: what the source calls the item of each event.
        codes: first-level memory code of each event.
        codes_of: the bundle whose memory gave them.
        code: the most frequent one.
        code_share: share of the events that have it, 0 to 1: the ratio of a model to which all writes are alike.
        models: the bundle's and, where one was given, the other's.
        picture: path of the PNG.
    """

    dataset: str
    user: str
    events: int
    left_out: int
    items: list[str]
    codes: list[int]
    codes_of: str
    code: int
    code_share: float
    models: tuple[ModelSink, ...]
    picture: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return asdict(self)


def inspect_sink(
    bundle: Bundle | Path | str,
    *,
    against: Bundle | Path | str | None = None,
    user: str | None = None,
    data: Dataset | Path | str | None = None,
    out: Path | str | None = None,
) -> SinkReport:
    """Measure and draw how much the write of each event of one history still adds to the readouts.

    Args:
        bundle: a trained SinkRec.
        against: another one, trained on the same items, drawn under it over the same history and codes; one of the two
            needs a memory, whose codes those are (of two, that of ``bundle``).
        user: as the source calls them; default: of the users whose history fits the models whole, the one with the
            longest (where none fits, the longest of all, of which the newest events are read).
        data: a dataset or its folder; default: the one that the bundle says it was trained on.
        out: path of the PNG; default: reports/sink.png in the bundle.

    Returns:
        What was found. The history is that from which the user's test target is predicted, cut to the newest events
        that both models were trained to read.

    Raises:
        BundleError: no SinkRec with weights, or one of other items.
        ConfigError: neither model has a memory, a model has no recurrence, or ``out`` is no PNG.
        DataError: no such data or user, or a user without events.
    """
    opened = [x if isinstance(x, Bundle) else Bundle.open(x) for x in (bundle, against) if x is not None]
    picture = opened[0].path / PICTURE if out is None else Path(out)
    if picture.suffix.lower() != ".png":
        raise ConfigError(f"the picture is a PNG, but --out is {picture}; give it a name that ends in .png")
    models = [_model(one) for one in opened]
    with_memory = [index for index, model in enumerate(models) if model.config.memory]
    if not with_memory:
        names = " nor ".join(str(one.path) for one in opened)
        raise ConfigError(
            f"{'neither ' if len(opened) > 1 else ''}{names} has {'a' if len(opened) > 1 else 'no'} memory, whose "
            "codes mark the events; give one that has, such as a sinkrec preset that is no twin, with --against"
        )
    dataset = _dataset(opened[0], data)
    for one in opened:
        _check_same_items(one, dataset)
    chosen, items, times, left_out = _history(dataset, user, _limit(opened))
    lengths = torch.tensor([len(items)], dtype=torch.int32)
    with torch.no_grad():
        codes = models[with_memory[0]].codes(items.unsqueeze(0), lengths)[0, :, 0]
    found = [sink(model, items, times, codes) for model in models]
    report = SinkReport(
        dataset=dataset.name,
        user=chosen,
        events=len(items),
        left_out=left_out,
        items=[dataset.item_tokens[item] for item in items.tolist()],
        codes=codes.tolist(),
        codes_of=str(opened[with_memory[0]].path),
        code=found[0].code,
        code_share=float((codes == found[0].code).double().mean()),
        models=tuple(
            ModelSink(str(one.path), _name(one), each.ratio, each.influence.tolist())
            for one, each in zip(opened, found, strict=True)
        ),
        picture=str(picture),
    )
    panels = [Panel(model.name, each) for model, each in zip(report.models, found, strict=True)]
    draw(panels, picture, title=f"user {report.user} of {report.dataset}, {report.events:,} events")
    return report


def draw(panels: Sequence[Panel], path: Path | str, *, title: str) -> None:
    """Draw one history through one or more models, one under the other, as PNG.

    Args:
        panels: as of ``put``.
        path: of the PNG; its folder is made.
        title: over all.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[str, Any] = {"font.size": 10.5, "savefig.transparent": True}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), _INK)
    with pyplot.rc_context(style):  # type: ignore[arg-type]
        figure = pyplot.figure(figsize=(9, 1 + 2.3 * len(panels)), layout="constrained")
        put(figure, panels, title=title)
        with files.replacing(path) as temporary:
            figure.savefig(temporary, dpi=160, format="png")
        pyplot.close(figure)


def put(figure: Figure, panels: Sequence[Panel], *, title: str) -> None:
    """Put one history through one or more models on a figure, one under the other.

    Each event is a line as high as its write's share of the model's whole influence, coloured by memory code: the most
    frequent one, the next four, and all others.

    Args:
        figure: an empty one.
        panels: of the same history, with the same codes.
        title: over all.
    """
    column = figure.subplots(len(panels), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, panel in zip(column, panels, strict=True):
        _put(axes, panel)
    column[-1].set_xlabel("event")
    figure.suptitle(title)
    handles, labels = column[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)


def _put(axes: Axes, panel: Panel) -> None:
    """Put one model's lines on its axes."""
    found = panel.found
    influence, codes = found.influence.cpu().numpy(), found.codes.cpu().numpy()
    share = 100 * influence / max(influence.sum(), np.finfo(np.float64).tiny)
    places = np.arange(1, len(codes) + 1)
    width = min(_LARGEST_DOT, max(0.4, 400 / len(codes)))
    for mark, colour, label in _marks(codes, found.code):
        axes.vlines(places[mark], 0, share[mark], color=colour, linewidth=width, label=label)
        if width == _LARGEST_DOT:
            axes.plot(places[mark], share[mark], "o", color=colour, markersize=_LARGEST_DOT)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, len(codes) + 1)
    axes.set_ylabel("share of influence, %")
    axes.grid(True, axis="y", color=_INK, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{panel.label}: sink ratio {found.ratio:.2f}", fontsize=10.5, loc="left")


def _marks(codes: np.ndarray, most: int) -> list[tuple[np.ndarray, str, str]]:
    """Return which events have which colour and label: rarest codes first, so that the most frequent is on top."""
    values, counts = np.unique(codes, return_counts=True)
    order = values[np.lexsort((values, -counts))]
    following = [code for code in order if code != most][: len(_NEXT_FREQUENT)]
    share = float((codes == most).mean())
    marks = [(codes == most, _MOST_FREQUENT, f"code {most}, {100 * share:.0f}% of events")]
    marks += [(codes == code, colour, f"code {code}") for code, colour in zip(following, _NEXT_FREQUENT, strict=False)]
    others = ~np.isin(codes, [most, *following])
    if others.any():
        marks.append((others, _INK, f"{len(order) - 1 - len(following)} other codes"))
    return marks


def _model(bundle: Bundle) -> SinkRec:
    if bundle.config.get("model") != "sinkrec":
        raise BundleError(
            f"{bundle.path} holds a {bundle.config.get('model')}, but the sink is that of a SinkRec's recurrence; give "
            "a bundle of a sinkrec preset (`zoo list`)"
        )
    model: SinkRec = load_model(bundle)
    if not model.config.layers("T"):
        raise ConfigError(
            f"the model of {bundle.path} has the group {model.config.group!r}, without a recurrence (T) that writes; "
            "give one that has"
        )
    return model


def _dataset(bundle: Bundle, data: Dataset | Path | str | None) -> Dataset:
    if isinstance(data, Dataset):
        return data
    path = data or bundle.manifest.get("training", {}).get("dataset_path")
    if path is None:
        raise DataError(f"{bundle.path} does not say what it was trained on; name a prepared dataset with --data")
    try:
        return load_dataset(path)
    except DataError as error:
        if data is not None:
            raise
        raise DataError(
            f"{bundle.path} was trained on {path}, but {error}; or name another copy with --data"
        ) from error


def _check_same_items(bundle: Bundle, dataset: Dataset) -> None:
    same = files.sha256_of(bundle.file(SEMANTIC_IDS)) == files.sha256_of(dataset.path / SEMANTIC_IDS)
    if not same or bundle.config.get("num_items") != dataset.num_items:
        raise BundleError(
            f"{bundle.path} was trained on other items ({_training(bundle).get('dataset', 'unknown')}) than those of "
            f"{dataset.path}; both bundles and --data must be of one prepared dataset"
        )


def _training(bundle: Bundle) -> Mapping[str, Any]:
    training: Mapping[str, Any] = bundle.manifest.get("training", {})
    return training


def _limit(bundles: Sequence[Bundle]) -> int:
    """Return how many events all models were trained to read, and a matrix can be made of."""
    return min([MOST_POSITIONS, *(int(_training(one).get("max_length", MOST_POSITIONS)) for one in bundles)])


def _history(dataset: Dataset, user: str | None, limit: int) -> tuple[str, Tensor, Tensor, int]:
    """Return the user's name, items and times int64 [L] of the newest events, and how many older ones there are."""
    tokens = dataset.user_tokens()
    ends = dataset.history_end("test")
    lengths = ends - dataset.user_offsets[:-1]
    if user is None:
        fitting = np.where(lengths <= limit, lengths, -1)
        index = int(fitting.argmax() if fitting.max(initial=-1) > 0 else lengths.argmax())
    elif user in tokens:
        index = tokens.index(user)
    else:
        raise DataError(
            f"{dataset.name} has no user {user!r}; it has {len(tokens):,}, such as {', '.join(tokens[:3])} (a user of "
            "few events may have been left out: see `zoo data`)"
        )
    if lengths[index] <= 0:
        raise DataError(f"user {tokens[index]} of {dataset.name} has no event before the test target; choose another")
    items, times, _ = timed_histories(dataset, np.array([index]), ends[[index]], limit)
    return tokens[index], items[0], times[0], int(lengths[index]) - items.shape[1]


def _name(bundle: Bundle) -> str:
    preset, twin = (bundle.manifest.get(field) for field in ("preset", "twin"))
    return f"{preset or bundle.path.name}{f', {twin}' if twin else ''}"
