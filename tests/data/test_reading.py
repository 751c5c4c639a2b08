from datetime import date

import polars as pl
import pytest

from zoo.data.cleaning import clean
from zoo.data.reading import Columns, find_source, read_interactions
from zoo.errors import ConfigError, DataError

ROWS = [(1, 10, 100), (1, 11, 200), (1, 12, 300)]


def read(path, **columns):
    return read_interactions(find_source(path), Columns(**columns))


def parquet(tmp_path, name="d.parquet", **columns):
    path = tmp_path / name
    pl.DataFrame(columns).write_parquet(path)
    return path


def test_integer_tokens_are_integers_and_times_numbers(write_atomic):
    found = read(write_atomic(ROWS))
    assert found.events.rows() == ROWS
    assert found.integer_items
    assert found.texts is None


def test_one_token_that_is_not_canonical_makes_all_of_them_strings(write_atomic):
    found = read(write_atomic([(1, "010", 100), *ROWS[1:]]))
    assert not found.integer_items
    assert found.events["item"].to_list() == ["010", "11", "12"]


def test_quotes_crlf_and_byte_order_mark_are_taken_as_text_files_have_them(tmp_path):
    path = tmp_path / "d.inter"
    path.write_bytes(b'\xef\xbb\xbfuser_id:token\titem_id:token\ttimestamp:float\r\nu\t"M" (1931)\t5.5\r\n')
    assert read(path).events.rows() == [("u", '"M" (1931)', 5.5)]


def test_a_folder_is_read_with_its_item_text(write_atomic):
    events = write_atomic(ROWS)
    write_atomic(
        [(10, "Toy Story", 1995.0, 4.2, "Comedy Family"), (11, None, None, 1, "Drama")],
        "item_id:token title:token_seq release_year:float price:float class:token_seq",
        "d.item",
    )
    for source in (events, events.parent):
        texts = read(source).texts
        assert texts.rows() == [("10", "Toy Story 1995.0 Comedy Family"), ("11", "Drama")]


def test_parquet_with_text_lists_years_and_named_columns(tmp_path):
    parquet(tmp_path, who=["a", "b"], what=[1, 2], when=[1.5, 2.5])
    parquet(tmp_path, "items.parquet", item=[1, 2], title=["T", None], tags=[["x", "y"], []], year=[1999, 2000])
    found = read(tmp_path, user="who", item="what", timestamp="when")
    assert found.events.rows() == [("a", 1, 1.5), ("b", 2, 2.5)]
    assert [text.split() for text in found.texts["text"]] == [["T", "x", "y", "1999"], ["2000"]]


@pytest.mark.parametrize("names", [("user", "item"), ("user_id", "item_id")])
def test_both_usual_names_are_found(tmp_path, names):
    path = parquet(tmp_path, **{names[0]: [1], names[1]: [2], "timestamp": [3]})
    assert read(path).events.rows() == [(1, 2, 3)]


def test_parquet_strings_stay_strings_even_when_they_look_like_huge_numbers(tmp_path):
    found = read(parquet(tmp_path, user=[1], item=[str(2**40)], timestamp=[3]))
    assert found.events["item"].to_list() == [str(2**40)]


def test_dates_in_parquet_are_milliseconds(tmp_path):
    found = read(parquet(tmp_path, user=[1], item=[2], timestamp=[date(1970, 1, 2)]))
    assert (found.events["time"].to_list(), found.time_unit) == ([86_400_000], "ms")


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_datetimes_in_parquet_are_as_fine_as_the_file_has_them(tmp_path, unit, zone):
    times = pl.Series([1_700_000_000_000_001, None, 1_700_000_000_000_000]).cast(pl.Datetime(unit, zone))
    found = read(parquet(tmp_path, user=[1, 1, 1], item=[2, 3, 4], timestamp=times))
    assert found.events["time"].to_list() == [1_700_000_000_000_001, None, 1_700_000_000_000_000]
    assert found.time_unit == unit


@pytest.mark.parametrize("unit", ["us", "ns"])
def test_events_within_a_millisecond_are_no_duplicates_and_keep_their_order(tmp_path, unit):
    start = 1_700_000_000 * {"us": 10**6, "ns": 10**9}[unit]
    times = [start + 7, start, start + 9, start + 9, start + 8]
    for column in (pl.Series(times), pl.Series(times).cast(pl.Datetime(unit))):
        result = clean(read(parquet(tmp_path, user=[1] * 5, item=[1, 2, 1, 1, 1], timestamp=column)))
        assert result.item_ids[result.items].tolist() == [2, 1, 1, 1]
        assert result.timestamps.tolist() == [1_700_000_000] * 4
        assert (result.report.rows_dropped_duplicate, result.report.time_unit) == (1, unit)


def test_whole_floats_are_ids_as_pandas_writes_them_with_gaps(tmp_path):
    found = read(parquet(tmp_path, user=[1.0, None], item=[2.0, float("nan")], timestamp=[3, 4]))
    assert found.events.rows() == [(1, 2, 3), (None, None, 4)]


def test_whole_floats_in_the_item_file_are_the_same_ids(tmp_path):
    path = parquet(tmp_path, user=[1.0, 1.0, None], item=[1.0, 2.0, float("nan")], timestamp=[3, 4, 5])
    parquet(tmp_path, "items.parquet", item_id=[1.0, None, 2.0], title=["one", "nothing", "two"])
    for source in (tmp_path, path):
        texts = read_interactions(find_source(source, tmp_path / "items.parquet")).texts
        assert texts.rows() == [("1", "one"), ("2", "two")]


@pytest.mark.parametrize(
    ("values", "message"),
    [([[1], [2]], "List"), ([["a"], ["b"]], "List"), ([{"a": 1}, {"a": 2}], "Struct"), ([1.5, 2.0], "fractions")],
    ids=["lists", "lists of text", "structs", "fractions"],
)
def test_item_ids_of_the_wrong_kind_are_an_error_in_both_files(tmp_path, values, message):
    events = parquet(tmp_path, user=[1, 2], item=[1, 2], timestamp=[1, 2])
    items = parquet(tmp_path, "items.parquet", item=values, title=["a", "b"])
    with pytest.raises(DataError, match=rf'column "item" of .*items\.parquet .*{message}.*cast it'):
        read_interactions(find_source(events, items))
    with pytest.raises(DataError, match=rf'column "item" of .*d\.parquet .*{message}.*cast it'):
        read(parquet(tmp_path, user=[1, 2], item=values, timestamp=[1, 2]))


def test_years_of_an_odd_type_are_no_text(tmp_path):
    parquet(tmp_path, user=[1], item=[2], timestamp=[3])
    parquet(tmp_path, "items.parquet", item=[2], years=[[1999]], year=[{"from": 1999}], title=["T"])
    assert read(tmp_path).texts.rows() == [("2", "T")]


@pytest.mark.parametrize("dtype", [pl.Int8, pl.UInt16, pl.UInt64, pl.Int128])
def test_every_integer_type_is_taken(tmp_path, dtype):
    path = tmp_path / "d.parquet"
    pl.DataFrame({"user": [1], "item": [2], "timestamp": [3]}).cast(dtype).write_parquet(path)
    assert read(path).events.schema == {"user": pl.Int64, "item": pl.Int64, "time": pl.Int64}


def test_user_tokens_may_be_longer_than_any_integer(write_atomic):
    users = [10**19, 10**50]
    assert read(write_atomic([(user, 1, 2) for user in users])).events["user"].to_list() == [str(u) for u in users]


def test_categories_and_empty_strings(tmp_path):
    found = read(parquet(tmp_path, user=["a", ""], item=pl.Series(["x", "y"], dtype=pl.Categorical), timestamp=[1, 2]))
    assert found.events.rows() == [("a", "x", 1), (None, "y", 2)]


def test_missing_values_are_null_and_are_not_dropped_here(write_atomic):
    found = read(write_atomic([*ROWS, (None, 1, 2), (1, None, 2), (1, 1, None), (1, 1, "nan"), (1,)]))
    assert found.events.null_count().row(0) == (1, 2, 3)


def test_a_missing_column_names_those_that_are_there(write_atomic):
    path = write_atomic(ROWS, "user_id:token movie:token timestamp:float")
    with pytest.raises(
        DataError, match=r'no item column "item_id" or "item", it has user_id, movie, timestamp; .*--item-column'
    ):
        read(path)
    with pytest.raises(DataError, match=r'no user column "customer"'):
        read(path, user="customer")


@pytest.mark.parametrize("name", ["d.inter", "d.parquet"])
def test_an_empty_file_is_an_error(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match="empty file of 0 bytes"):
        read(tmp_path / name)


def test_a_header_without_events_is_an_error(write_atomic, tmp_path):
    for path in (write_atomic([]), parquet(tmp_path, user=[], item=[], timestamp=[])):
        with pytest.raises(DataError, match="no events"):
            read(path)


@pytest.mark.parametrize("keep", [3, 40, 0.5, 0.99])
def test_a_truncated_parquet_file_is_an_error(tmp_path, keep):
    path = parquet(tmp_path, user=list(range(500)), item=list(range(500)), timestamp=list(range(500)))
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    with pytest.raises(DataError, match="cannot be read as a whole Parquet file"):
        read(path)


@pytest.mark.parametrize("name", ["d.inter", "d.parquet"])
@pytest.mark.parametrize("junk", [bytes(range(256)) * 8, b"\x00" * 999, b"PAR1" + b"\x07" * 99 + b"PAR1"], ids=str)
def test_binary_junk_is_an_error(tmp_path, name, junk):
    (tmp_path / name).write_bytes(junk)
    with pytest.raises(DataError, match=r"d\.(inter|parquet)"):
        read(tmp_path / name)


def test_a_line_with_too_many_fields_is_an_error(write_atomic):
    with pytest.raises(DataError, match="cannot be read as a tab-separated"):
        read(write_atomic([*ROWS, (1, 2, 3, 4)]))


def test_times_that_are_no_numbers_are_counted_and_shown(write_atomic):
    with pytest.raises(DataError, match=r'2 of 5 times .*"timestamp".* are not numbers, the first one is "yesterday"'):
        read(write_atomic([*ROWS, (1, 2, "yesterday"), (1, 2, "today")]))


@pytest.mark.parametrize("bad", [2**31, 2**40, 10**30])
def test_atomic_ids_of_2_31_and_more_are_an_error(write_atomic, bad):
    with pytest.raises(DataError, match=rf"1 item ids of .* outside 0 <= id < 2\^31, the first one is {bad}; .*letter"):
        read(write_atomic([*ROWS, (1, bad, 5), (2, bad, 5)]))


@pytest.mark.parametrize("bad", [2**31, -1])
def test_parquet_ids_out_of_range_are_an_error(tmp_path, bad):
    with pytest.raises(DataError, match=rf"first one is {bad}; store the column as strings"):
        read(parquet(tmp_path, user=[1, 1], item=[2**31 - 1, bad], timestamp=[1, 2]))


@pytest.mark.parametrize(
    ("values", "message"), [([1.5, 2], "holds fractions"), ([[1], [2]], "of type List")], ids=["fractions", "lists"]
)
def test_ids_of_the_wrong_kind_are_an_error(tmp_path, values, message):
    with pytest.raises(DataError, match=message):
        read(parquet(tmp_path, user=[1, 2], item=values, timestamp=[1, 2]))


def test_a_source_that_is_no_single_file_says_what_was_found(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        find_source(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"found none; name the file"):
        find_source(tmp_path)
    (tmp_path / "a.inter").touch()
    (tmp_path / "b.inter").touch()
    with pytest.raises(DataError, match=r"found a\.inter, b\.inter"):
        find_source(tmp_path)
    (tmp_path / "c.csv").touch()
    with pytest.raises(DataError, match=r'ends in "\.csv"'):
        find_source(tmp_path / "c.csv")
    with pytest.raises(DataError, match=r"item file .* does not exist"):
        find_source(tmp_path / "a.inter", tmp_path / "a.items")


def test_folders_that_are_called_like_files_are_passed_over(write_atomic):
    events = write_atomic(ROWS)
    for name in ("x.inter", "x.parquet", "x.item", "d.item", "items.parquet"):
        (events.parent / name).mkdir()
    assert read(events.parent).events.rows() == ROWS
    events.unlink()
    with pytest.raises(DataError, match="found none"):
        find_source(events.parent)


@pytest.mark.parametrize("name", ["item_id", "item_id:float", "item_id:token"])
def test_a_column_that_an_atomic_file_names_twice_is_an_error(write_atomic, name):
    path = write_atomic([(1, 10, 10, 5)], f"user_id:token item_id:token {name} timestamp:float")
    with pytest.raises(DataError, match=r'd\.inter names the column "item_id" 2 times, .*; rename'):
        read(path)
    path = write_atomic(ROWS)
    write_atomic([(10, 10, "T")], f"item_id:token {name} title:token_seq", "d.item")
    with pytest.raises(DataError, match=r'd\.item names the column "item_id" 2 times'):
        read(path)


@pytest.mark.parametrize("blank", ["\n", "\r\n\n"])
def test_blank_lines_before_the_header_are_skipped(tmp_path, blank):
    path = tmp_path / "d.inter"
    header = "user_id:token\titem_id:token\ttimestamp:float"
    path.write_bytes(f"{blank}{header}\n1\t2\t3\n".encode())
    assert read(path).events.rows() == [(1, 2, 3)]
    path.write_bytes(f"{blank}{header}\titem_id:float\n1\t2\t3\t2\n".encode())
    with pytest.raises(DataError, match='names the column "item_id" 2 times'):
        read(path)


def test_columns_without_a_name_are_let_be(tmp_path):
    path = tmp_path / "d.inter"
    path.write_text("user_id:token\titem_id:token\ttimestamp:float\t\t\n1\t2\t3\t\t\n")
    assert read(path).events.rows() == [(1, 2, 3)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "parquet"])
def test_a_file_that_is_no_utf_8_text_says_so_in_printable_words(tmp_path, encoding):
    path = tmp_path / "d.inter"
    if encoding == "parquet":
        parquet(tmp_path, "d.inter", user_id=[1], item_id=[2], timestamp=[3])
    else:
        path.write_bytes("user_id:token\titem_id:token\ttimestamp:float\n1\t2\t3\n".encode(encoding))
    with pytest.raises(DataError, match=r"not UTF-8 text with a header such as user_id:token; write") as caught:
        read(path)
    assert str(caught.value).isprintable()


def test_messages_hold_no_control_characters_of_the_file(tmp_path, write_atomic):
    path = parquet(tmp_path, **{"user": [1], "a\x1b[31m\n": [1]})
    with pytest.raises(DataError, match="no item column") as no_column:
        read(path)
    with pytest.raises(DataError, match="are not numbers") as no_time:
        read(write_atomic([(1, 2, "5\x1b[31m")]))
    assert str(no_column.value).isprintable()
    assert str(no_time.value).isprintable()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"user": "item"},
            '"item" .* taken as the user and the item, .*; name .*--user-column NAME or --item-column NAME',
        ),
        ({"item": "timestamp"}, '"timestamp" .* the item and the timestamp'),
        ({"user": "user", "timestamp": "user"}, '"user" .* the user and the timestamp'),
    ],
    ids=["user", "item", "timestamp"],
)
def test_one_column_named_for_two_is_an_error(tmp_path, columns, message):
    with pytest.raises(ConfigError, match=message):
        read(parquet(tmp_path, user=[1], item=[2], timestamp=[3]), **columns)
