"""Every part at one length, model against exported file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from export.onnx_export import DTYPES, FLOATING, floating_dtype
from validate.codes import Choices, check_codes
from validate.executors import Executor, TorchExecutor
from validate.inputs import LENGTHS, Case, cases, draw_inputs
from validate.report import Check
from validate.tolerance import deviation
from zoo.models.parts import Part
from zoo.models.sinkrec import CODES
from zoo.signature import BEFORE, TensorSpec


@dataclass
class _Sample:
    """All values of one output that were compared at one length, case by case."""

    cases: list[Case] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)
    ref64: list[Tensor] = field(default_factory=list)
    ref_lo: list[Tensor] = field(default_factory=list)


def check_parity(
    parts: Sequence[Part],
    exact: Mapping[str, TorchExecutor],
    low: Mapping[str, TorchExecutor],
    executors: Mapping[str, Executor],
    dtype: str,
    length: int,
    seed: int,
) -> Iterator[Check]:
    """Compare every part at one length; inputs and states of later parts are the outputs of earlier ones.

    The norms of the tolerance rule run over all cases of the length together. A part has one check for each output
    (and each value of a selector such as ``digit``, and once more from states at random), and one for each case that
    could not be run.

    Where a file chooses memory codes, both references take its choices: of two codes that rounding cannot tell apart
    either is right, and all that follows from the choice differs. The choices that were followed are judged by one more
    check of the part (``validate.codes``).
    """
    torch_dtype = DTYPES[dtype]
    samples: dict[tuple[str, str], _Sample] = {}
    choices: dict[str, list[Choices]] = {}
    for case in cases(length, seed=seed + 1000 * length):
        known: dict[str, Tensor] = {}
        for part in parts:
            specs = part.signature.outputs
            for label, inputs in _variants(part, case, known, torch_dtype):
                outputs: dict[str, Tensor] = {}
                if part.name in executors:
                    try:
                        outputs = executors[part.name](inputs)
                    except Exception as error:  # whatever the executor raises is the finding
                        subject = f"{executors[part.name].name}, {_named(case)}{label}"
                        yield Check("parity", part.name, dtype, subject, False, sentence(error))
                codes = _choices(outputs, part, case)
                if codes is not None:
                    choices.setdefault(part.name, []).append(Choices(case, inputs, codes))
                ref64 = exact[part.name](inputs, codes)
                known |= {spec.name: _as_given(ref64[spec.name], spec, torch_dtype) for spec in specs}
                known[LENGTHS] = inputs[LENGTHS]
                ref_lo = low[part.name](inputs, codes) if outputs else {}
                for name, out in outputs.items():
                    sample = samples.setdefault((part.name, name + label), _Sample())
                    sample.cases.append(case)
                    sample.out.append(out)
                    sample.ref64.append(ref64[name])
                    sample.ref_lo.append(ref_lo[name])
    for (part_name, output), sample in samples.items():
        yield _judge(sample, part_name, output, executors[part_name].name, dtype, length)
    for part in parts:
        if part.name in choices:
            subject = f"{executors[part.name].name}, length {length}, {CODES}"
            yield check_codes(part, choices[part.name], exact[part.name], low[part.name], dtype, subject)


def _as_given(value: Tensor, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    """Return an output as an input of the next part."""
    return value.to(floating_dtype(spec, dtype)) if spec.dtype in FLOATING else value


def _choices(outputs: dict[str, Tensor], part: Part, case: Case) -> Tensor | None:
    """Take the codes out of a file's outputs; those of a wrong shape stay there, to be reported as such."""
    shapes = {spec.name: tuple(spec.resolved_shape(case.sizes)) for spec in part.signature.outputs}
    return outputs.pop(CODES) if CODES in outputs and tuple(outputs[CODES].shape) == shapes[CODES] else None


def sentence(error: Exception) -> str:
    """Return an error of any origin on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _variants(
    part: Part, case: Case, known: dict[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the inputs of a case, with a label: of a part with a one-element selector such as ``digit`` once for every
    value, of one with states those that ``known`` holds, then any: events that no history has, times in any order."""
    inputs = draw_inputs(part.signature, case, known, dtype)
    states = {spec.name.removesuffix(BEFORE) for spec in part.signature.inputs if spec.name.endswith(BEFORE)}
    if states & known.keys():
        rest = {name: known[name] for name in known.keys() - states}
        yield "", inputs
        yield ", states at random", draw_inputs(part.signature, case, rest, dtype)
        return
    selectors = [spec for spec in part.signature.inputs if spec.shape == (1,) and isinstance(spec.limit, int)]
    if not selectors:
        yield "", inputs
        return
    selector = selectors[0]
    assert isinstance(selector.limit, int)
    for value in range(selector.limit):
        chosen = torch.full_like(inputs[selector.name], value)
        yield f", {selector.name} {value}", {**inputs, selector.name: chosen}


def _judge(sample: _Sample, part: str, output: str, executor: str, dtype: str, length: int) -> Check:
    subject = f"{executor}, length {length}, {len(sample.cases)} batches, {output}"
    for case, out, ref64 in zip(sample.cases, sample.out, sample.ref64, strict=True):
        if out.shape != ref64.shape:
            detail = f"{output} has shape {list(out.shape)} for {_named(case)}; {list(ref64.shape)} is right"
            return Check("parity", part, dtype, subject, False, detail)
    out, ref64, ref_lo = (_joined(tensors) for tensors in (sample.out, sample.ref64, sample.ref_lo))
    if not ref64.is_floating_point():
        wrong = int((out != ref64).sum())
        detail = f"{wrong} of {out.numel()} whole numbers of {output} differ" if wrong else ""
        return Check("parity", part, dtype, subject, not wrong, detail, {"values": out.numel()})
    found = deviation(out, ref64, ref_lo, DTYPES[dtype])
    case, index = _place(sample, found.worst_index[0] if found.worst_index else 0)
    figures = {
        "values": sum(out.numel() for out in sample.out),
        "rms": found.rms,
        "rms_allowed": found.rms_allowed,
        "max": found.max,
        "max_allowed": found.max_allowed,
        "share": found.share,
        "worst_batch": case.batch,
        "worst_seed": case.seed,
        "worst_index": index,
    }
    detail = ""
    if not found.ok:
        detail = (
            f"{output} is {found.rms:.2e} (rms) and {found.max:.2e} (max, at {index} of {_named(case)}) from float64; "
            f"{found.rms_allowed:.2e} and {found.max_allowed:.2e} are allowed"
        )
    return Check("parity", part, dtype, subject, found.ok, detail, figures)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _place(sample: _Sample, position: int) -> tuple[Case, list[int]]:
    """Return the case and the index within its output of a position in the concatenated values."""
    for case, out in zip(sample.cases, sample.out, strict=True):
        if position < out.numel():
            return case, [int(i) for i in torch.unravel_index(torch.tensor(position), out.shape)]
        position -= out.numel()
    return sample.cases[-1], []


def _named(case: Case) -> str:
    return f"batch {case.batch}, length {case.length}, seed {case.seed}"
