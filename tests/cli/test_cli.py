"""The command line as a user types it, on a small dataset of their own."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.training.conftest import TINY, write_events
from zoo import verbs
from zoo.cli import main

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")

SMALL = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def prepared(folder):
    events = write_events(folder / "walks.parquet")
    assert run("data", events, "--out", folder / "walks", "--codebook-size", 8) == 0
    return folder / "walks"


@pytest.fixture(scope="module")
def bundle(folder, prepared):
    path = folder / "bundle"
    assert run("train", "gbla-tiny", "--data", prepared, "--out", path, "--steps", 12, *SMALL) == 0
    return path


def test_a_path_of_ones_own_goes_from_events_to_a_passed_validation(bundle, prepared, capsys):
    if find_spec("tensorrt_rtx_bindings") is None:  # importing it here would spring its library trap
        pytest.skip("building engines needs the rtx extra")
    assert run("eval", bundle, "--data", prepared) == 0
    assert run("export", bundle) == 0
    assert run("build", bundle, "--lengths", "8,16", "--batch", "1,2,4", "--beams", 5, "--targets", "sm89") == 0
    assert run("validate", bundle, "--lengths", "1,7,16") == 0
    assert run("inspect", bundle) == 0
    printed = capsys.readouterr().out
    for words in ("Recall@10", "GatedBidirectionalLinearAttention", "all passed", "engines were not executed"):
        assert words in printed


def test_json_output_is_json_and_nothing_else(bundle, prepared, capsys):
    for words in (("list",), ("inspect", bundle), ("data", prepared.with_suffix(".parquet"), "--out", prepared,
                  "--codebook-size", 8), ("export", bundle, "--dtypes", "fp32")):  # fmt: skip
        capsys.readouterr()
        assert run(*words, "--json") == 0
        json.loads(capsys.readouterr().out)


def test_a_folder_called_kernels_is_a_bundle_and_the_word_is_not(bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels").symlink_to(bundle)
    assert run("inspect", "--json", "./kernels") == 0
    assert json.loads(capsys.readouterr().out)["files"]
    assert run("inspect", "kernels", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ops"]
    assert verbs.inspect(Path("kernels"))["files"]
    with pytest.raises(TypeError, match="capability"):
        verbs.inspect("./kernels", capability=90)


@no_gpu
def test_without_a_gpu_every_op_takes_its_reference_and_says_so(capsys):
    assert run("inspect", "kernels") == 0
    printed = capsys.readouterr().out
    assert printed.count("the tensors are on the CPU") == 12 and "nothing is launched" in printed
    assert run("inspect", "kernels", "--device", "cuda") == 2
    assert "--capability 90" in capsys.readouterr().err


def test_the_choice_of_another_gpu_needs_none_here(capsys):
    assert run("inspect", "kernels", "--capability", 90) == 0
    printed = capsys.readouterr().out
    assert printed.count("Triton on compute capability 9.0") == 12
    assert all(kernel in printed for kernel in ("reduce", "walk back", "gradients"))
    found = verbs.inspect("kernels", preset="gbla-tiny", capability=89)
    launches = [launch for op in found["ops"] for launch in op["launches"]]
    convolutions, attention = {"forward", "backward"}, {"reduce", "apply", "queries", "keys"}
    delta_rule = {"solve", "walk", "walk back", "gradients", "step"}
    assert {launch["kernel"] for launch in launches} == convolutions | attention | delta_rule
    assert not any(launch["tma"] for launch in launches)
    assert all(launch["channels"] in (16, 32) for launch in launches if launch["resident"])
    too_old = verbs.inspect("kernels", capability=75)["ops"]
    assert {op["implementation"] for op in too_old} == {"reference"}
    assert {op["reason"] for op in too_old} == {"compute capability 7.5 is older than 8.0"}


def test_the_environment_decides_what_is_shown(monkeypatch):
    monkeypatch.setenv("TRT_ZOO_KERNELS", "reference")
    assert {op["implementation"] for op in verbs.inspect("kernels", capability=90)["ops"]} == {"reference"}


def test_a_failed_check_exits_with_1(bundle, capsys):
    assert run("export", bundle, "--dtypes", "fp32") == 0
    path = bundle / "onnx/encoder-fp32.onnx"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert run("validate", bundle, "--dtypes", "fp32", "--lengths", "2") == 1
    path.write_bytes(content)
    assert run("validate", bundle, "--dtypes", "fp32", "--lengths", "2") == 0
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "/nowhere"], "is not a bundle"),
        (["inspect", "kernels", "--preset", "gbla-huge"], "gbla-yandex"),
        (["inspect", "kernels", "--device", "gpu"], "cuda:NUMBER"),
        (["inspect", "kernels", "--capability", 9], "90 for 9.0"),
        (["inspect", "kernels", "--device", "cpu", "--capability", 90], "give one of the two"),
        (["init", "gbla-huge", "/tmp/none"], "gbla-yandex"),
        (["init", "gbla-tiny", "/tmp/none", "--set", "depth=3"], "num_layers"),
        (["init", "gbla-tiny", "/tmp/none", "--set", "depth"], "FIELD=VALUE"),
        (["data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["train", "gbla-tiny", "--data", "/nowhere", "--out", "/tmp/none"], "/nowhere"),
        (["build", "/nowhere", "--lengths", "a,b"], "whole numbers"),
        (["validate", "/nowhere"], "is not a bundle"),
    ],
)
def test_a_mistake_is_one_sentence_without_a_traceback_and_exits_with_2(words, message, capsys):
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and "Error:" in error


def test_an_unknown_flavor_and_target_are_named(bundle, capsys):
    assert run("export", bundle, "--dtypes", "fp16") == 0
    assert run("build", bundle, "--flavor", "cuda") == 2
    assert "cuda" in capsys.readouterr().err
    assert run("build", bundle, "--targets", "sm90") == 2
    assert "sm90" in capsys.readouterr().err


def test_an_option_without_a_value_is_named_and_not_a_default(bundle, capsys):
    for words in (("build", bundle, "--targets", ","), ("validate", bundle, "--dtypes", " "),
                  ("build", bundle, "--lengths", ","), ("export", bundle, "--opset", 99)):  # fmt: skip
        assert run(*words) == 2
        assert words[2].removeprefix("--") in capsys.readouterr().err


def test_help_names_every_verb_and_every_option_says_what_it_does(capsys):
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert run("inspect", "--help") == 0
    printed += capsys.readouterr().out
    for verb in ("kernels", "list", "inspect", "data", "init", "train", "eval", "export", "build", "validate", "demo"):
        assert verb in printed


def test_the_version_is_printed(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("trt-zoo ")


def test_an_interruption_says_what_is_kept(monkeypatch, capsys, prepared, folder):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "train", interrupted)
    assert run("train", "gbla-tiny", "--data", prepared, "--out", folder / "never") == 130
    assert "interrupted; what was finished is kept" in capsys.readouterr().err


def test_no_name_of_a_twin_is_cut_off(capsys):
    assert run("list", "--twins") == 0
    assert "…" not in capsys.readouterr().out


def test_the_kernels_of_another_gpu_are_named_without_triton(monkeypatch, capsys):
    monkeypatch.setattr("zoo.kernels.launch._has_triton", lambda: False)
    assert run("inspect", "kernels", "--capability", 90) == 0
    assert "Triton on compute capability 9.0" in capsys.readouterr().out
    assert run("inspect", "kernels", "--capability", 70) == 0
    assert "older than 8.0" in capsys.readouterr().out


@no_gpu
def test_what_is_missing_for_the_kernels_is_named_with_its_cure(monkeypatch, capsys):
    monkeypatch.setattr("zoo.kernels.launch._has_triton", lambda: False)
    assert run("inspect", "kernels", "--json") == 0
    assert 'triton is not installed: pip install -e \\".[triton]\\"' in capsys.readouterr().out
