import polars as pl
import pytest

from tests.data.builders import small_events
from zoo.data.cleaning import clean
from zoo.data.reading import Interactions
from zoo.errors import DataError


def cleaned(rows, texts=None, unit=None):
    events = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    if texts is not None:
        texts = pl.DataFrame(texts, schema={"token": pl.String, "text": pl.String}, orient="row")
    return clean(Interactions(events, texts, unit))


def test_clean_events_are_kept_as_they_are_and_nothing_is_counted():
    result = cleaned(small_events())
    assert result.user_offsets.tolist() == [0, 5, 10, 15, 20, 25, 30]
    assert result.items[:5].tolist() == [0, 1, 2, 3, 4]
    assert result.item_ids.tolist() == list(range(8))
    report = result.report
    assert report.rows_read == 30
    assert report.items_without_text == 8
    counts = {name: value for name, value in vars(report).items() if name not in ("rows_read", "items_without_text")}
    assert counts.pop("time_unit") == "s"
    assert set(counts.values()) == {0}


def test_unsorted_times_are_sorted_and_ties_keep_the_order_of_the_file():
    result = cleaned([(1, 5, 30), (1, 6, 10), (1, 7, 30), (1, 8, 20), (1, 4, 30)])
    assert result.item_ids[result.items].tolist() == [6, 8, 5, 7, 4]
    assert result.timestamps.tolist() == [10, 20, 30, 30, 30]
    assert result.report.events_out_of_order == 2


def test_users_with_fewer_than_three_events_are_dropped_and_counted():
    result = cleaned([*small_events(users=2), (7, 1, 5), (8, 1, 5), (8, 2, 6), (9, 99, 1)])
    assert result.user_tokens == ["0", "1"]
    assert "99" not in result.item_tokens
    assert result.report.users_dropped_one_event == 2
    assert result.report.users_dropped_too_short == 3
    assert result.report.events_dropped_with_users == 4


def test_only_one_event_users_are_an_error():
    with pytest.raises(DataError, match=r"all 2 users have fewer than 3 events"):
        cleaned([(1, 1, 1), (2, 1, 1)])


def test_exact_duplicates_are_dropped_but_repeated_consumption_is_not():
    result = cleaned([(1, 1, 1), (1, 1, 1), (1, 1, 2), (1, 2, 3)])
    assert result.timestamps.tolist() == [1, 2, 3]
    assert result.report.rows_dropped_duplicate == 1


def test_a_few_incomplete_rows_are_dropped_and_counted_by_kind():
    rows = small_events(users=20)
    result = cleaned([*rows, (None, 1, 5), (1, None, 5), (1, 1, None), (None, 1, None)])
    assert len(result.items) == 100
    report = result.report
    assert (report.rows_without_user, report.rows_without_item, report.rows_without_time) == (2, 1, 2)
    assert report.rows_dropped_incomplete == 4


def test_more_than_five_percent_incomplete_rows_are_an_error():
    with pytest.raises(
        DataError, match=r"2 of 32 rows \(6.2%\) are incomplete \(0 without a user, .*2 without a time\)"
    ):
        cleaned([*small_events(), (1, 1, None), (1, 2, None)])


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_the_time_unit_is_found_and_reported(unit, scale):
    result = cleaned([(1, step, (1_700_000_000 + step) * scale) for step in range(4)])
    assert result.report.time_unit == unit
    assert result.timestamps.tolist() == [1_700_000_000 + step for step in range(4)]


def test_float_seconds_are_sorted_by_their_fractions_before_they_are_floored():
    result = cleaned([(1, 5, 10.75), (1, 6, 10.25), (1, 7, 9.5)])
    assert result.item_ids[result.items].tolist() == [7, 6, 5]
    assert result.timestamps.tolist() == [9, 10, 10]
    assert result.timestamps.dtype == "int64"


def test_a_stated_unit_is_believed_for_old_dates():
    assert cleaned([(1, step, 1000 * step) for step in range(3)], unit="ms").timestamps.tolist() == [0, 1, 2]


def test_mixed_time_units_are_an_error():
    with pytest.raises(DataError, match="mixes units"):
        cleaned([*small_events(), (1, 1, 1_700_000_000_000)])


def test_string_items_are_numbered_in_sorted_order_and_integers_are_their_own_ids():
    assert cleaned([("u", "b", 1), ("u", "c", 2), ("u", "a", 3)]).item_ids.tolist() == [0, 1, 2]
    numbered = cleaned([("u", 900, 1), ("u", 20, 2), ("u", 1000, 3)])
    assert numbered.item_ids.tolist() == [20, 900, 1000]
    assert numbered.item_tokens == ["20", "900", "1000"]


def test_item_text_is_joined_and_its_gaps_are_counted():
    texts = [("1", "one"), ("2", " "), ("1", "again"), ("77", "unused")]
    result = cleaned([(1, 1, 1), (1, 2, 2), (1, 3, 3)], texts)
    assert result.texts == ["one", "", ""]
    assert result.report.items_without_text == 2
    assert result.report.catalogue_items_without_events == 1
    assert result.report.catalogue_rows_duplicate == 1
