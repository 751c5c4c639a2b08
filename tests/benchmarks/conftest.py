import pytest
import torch

from benchmarks import peers, timing


@pytest.fixture
def played(monkeypatch):
    """Let the CPU play the GPU: candidates run once, and every one takes a millisecond."""
    taken = timing.Timing(1.0, 0.9, 1.1, 3)

    def times(candidates, sets, **_):
        for candidate in candidates.values():
            candidate(sets - 1)
        return dict.fromkeys(candidates, taken)

    def steps(step, count, **_):
        step(0)
        return taken, 2.0

    monkeypatch.setattr(timing, "require_cuda", lambda _: torch.device("cpu"))
    monkeypatch.setattr(timing, "time_graphs", times)
    monkeypatch.setattr(timing, "time_eager", times)
    monkeypatch.setattr(timing, "time_steps", steps)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda *_: 4e12)
    monkeypatch.setattr(timing, "matmul_rate", lambda *_: 8e14)
    monkeypatch.setattr(timing, "ROTATED_BYTES", 1)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    monkeypatch.setattr(peers, "cudnn_attention", peers.plain_attention)
    monkeypatch.setattr(peers, "torch_flash_attention", peers.plain_attention)
    monkeypatch.setattr(peers, "flash_attention_3", lambda: (peers.plain_attention, "played"))
