import torch
from hypothesis import given
from hypothesis import strategies as st

from validate import deviation


def test_an_output_as_good_as_the_reference_passes():
    ref64 = torch.randn(50, 7, dtype=torch.float64)
    low = ref64.half()
    assert deviation(low, ref64, low, torch.float16).ok


@given(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), st.integers(0, 349))
def test_one_wrong_element_is_found_and_named(dtype, index):
    ref64 = torch.randn(50, 7, dtype=torch.float64)
    low = ref64.to(dtype)
    out = low.clone()
    out.view(-1)[index] += 8 * torch.finfo(dtype).eps * ref64.abs().max()
    found = deviation(out, ref64, low, dtype)
    assert not found.ok
    assert found.worst_index == (index // 7, index % 7)
    assert found.share > 1


def test_an_error_spread_thin_is_found_by_the_rms_norm():
    ref64 = torch.ones(1000, dtype=torch.float64)
    low = ref64.float().clone()
    low[0] += 1e-3  # one bad element makes the maximum norm generous
    out = ref64.float() + 5e-4
    assert not deviation(out, ref64, low, torch.float32).ok


def test_nan_never_passes_unless_the_reference_has_it_there():
    ref64 = torch.zeros(4, dtype=torch.float64)
    assert not deviation(torch.tensor([0.0, torch.nan, 0, 0]), ref64, ref64.float(), torch.float32).ok
    ref64[1] = torch.inf
    same = torch.tensor([0.0, torch.inf, 0, 0])
    assert deviation(same, ref64, same, torch.float32).ok
    assert not deviation(-same, ref64, same, torch.float32).ok
    assert not deviation(torch.zeros(4), ref64, same, torch.float32).ok


def test_a_reference_that_overflows_excuses_nothing():
    ref64 = torch.full((4,), 1e5, dtype=torch.float64)
    overflowed = ref64.half()
    assert overflowed.isinf().all()
    assert not deviation(torch.zeros(4).half(), ref64, overflowed, torch.float16).ok
    assert not deviation(overflowed, ref64, overflowed, torch.float16).ok


def test_a_wrong_shape_never_passes_and_an_empty_output_does():
    ref64 = torch.zeros(2, 0, dtype=torch.float64)
    assert deviation(ref64.float(), ref64, ref64.float(), torch.float32).ok
    assert not deviation(torch.zeros(2, 1), ref64, ref64.float(), torch.float32).ok
