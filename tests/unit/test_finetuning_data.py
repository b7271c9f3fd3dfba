"""The data and encodings of the comparisons of fine-tuning, on small files of their formats."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="no pyarrow in this environment")

from finetuning.click_logs import Rows, read_log
from finetuning.encodings import SCHEMES, Encoder
from finetuning.outcomes import Gain, Run, Seconds, aims_of, rows_of

#: The columns of a year of the ASA Data Expo.
FLIGHT = (
    "Year,Month,DayofMonth,DayOfWeek,DepTime,CRSDepTime,ArrTime,CRSArrTime,UniqueCarrier,FlightNum,TailNum,"
    "ActualElapsedTime,CRSElapsedTime,AirTime,ArrDelay,DepDelay,Origin,Dest,Distance,TaxiIn,TaxiOut,Cancelled,"
    "CancellationCode,Diverted,CarrierDelay,WeatherDelay,NASDelay,SecurityDelay,LateAircraftDelay"
)
AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)


def flight(year: int, month: int, delay: str, origin: str = "JFK") -> str:
    """Return a line of a year of flights."""
    left = "NA" if delay == "NA" else "1230"
    return (
        f"{year},{month},3,4,{left},1215,NA,1400,AA,12,N1,95,105,80,3,{delay},{origin},BOS,187,4,11,0,,0,NA,NA,NA,NA,NA"
    )


def write_flights(folder: Path) -> None:
    """Write three years, one of them compressed."""
    years = {
        2006: [flight(2006, 1, "14"), flight(2006, 12, "15", "SFO"), flight(2006, 2, "NA")],
        2007: [flight(2007, 5, "-3")],
        2008: [flight(2008, 6, "90"), flight(2008, 7, "0", "SFO"), flight(2008, 12, "16", "ORD")],
    }
    for year, lines in years.items():
        content = "\n".join([FLIGHT, *lines, ""]).encode()
        if year == 2007:
            (folder / "2007.csv.gz").write_bytes(gzip.compress(content))
        else:
            (folder / f"{year}.csv").write_bytes(content)


def test_flights_are_split_by_year_and_month(tmp_path: Path) -> None:
    """2006 and 2007, 2008 until June, and the rest; a delay of 15 minutes counts, flights that never left do not."""
    write_flights(tmp_path)
    splits = read_log("flight", tmp_path)
    assert [own.y.tolist() for own in (splits.train, splits.validation, splits.test)] == [[0, 1, 0], [1], [0, 1]]
    np.testing.assert_array_equal(splits.train.numbers, [[1215, 187]] * 3)
    origins = [own.categories[:, 4].tolist() for own in (splits.train, splits.validation, splits.test)]
    assert origins[0] == [origins[1][0], origins[2][0], origins[1][0]]
    assert origins[2][1] not in origins[0]


def write_avazu(folder: Path) -> None:
    """Write 200 lines, of which each has a device of its own."""
    hours = ["14102100", "14102613"]  # a Tuesday and a Sunday of October 2014
    lines = [
        f"{1000 + at},{at % 2},{hours[at % 2]},1005,0,s,d,c,a,b,e,{at:08x},ip,m,1,0,1,320,50,1,0,35,-1,79"
        for at in range(200)
    ]
    (folder / "train.gz").write_bytes(gzip.compress("\n".join([AVAZU, *lines, ""]).encode()))


def test_avazu_is_shuffled_and_its_hours_become_two_categories(tmp_path: Path) -> None:
    """90, 5 and 5 % of the rows, in another order; the hour of the day and the weekday are categories."""
    write_avazu(tmp_path)
    splits = read_log("avazu", tmp_path / "train.gz", seed=3)
    parts = (splits.train, splits.validation, splits.test)
    assert [len(own) for own in parts] == [180, 10, 10]
    devices = np.concatenate([own.categories[:, 8] for own in parts])
    assert sorted(devices.tolist()) == list(range(200))
    assert devices.tolist() != sorted(devices.tolist())
    first = splits.train
    assert first.categories.shape == (180, 23)
    assert {tuple(own) for own in np.column_stack([first.categories[:, -2:], first.y]).tolist()} == {
        (0, 1, 0),
        (13, 6, 1),
    }
    again = read_log("avazu", tmp_path, seed=3)
    np.testing.assert_array_equal(again.train.categories, first.categories)


def write_criteo(folder: Path) -> None:
    """Write 100 lines with their number among the numbers; every tenth lacks a number and a category."""
    lines = []
    for at in range(100):
        numbers = ["" if at % 10 == 0 else str(at)] + ["1"] * 12
        texts = ["" if at % 10 == 0 else f"{at % 3:08x}"] + ["05db9164"] * 25
        lines.append("\t".join([str(at % 2), *numbers, *texts]))
    (folder / "train.txt").write_text("\n".join([*lines, ""]))


def test_criteo_is_split_in_its_order(tmp_path: Path) -> None:
    """The first 90, the next 5 and the last 5 %; a missing number is NaN, a missing category is one of its own."""
    write_criteo(tmp_path)
    splits = read_log("criteo", tmp_path)
    assert splits.train.numbers.shape == (90, 13)
    assert splits.train.categories.shape == (90, 26)
    np.testing.assert_array_equal(splits.validation.numbers[1:, 0], [91, 92, 93, 94])
    np.testing.assert_array_equal(splits.test.y, [1, 0, 1, 0, 1])
    assert np.isnan(splits.train.numbers[::10, 0]).all()
    missing, others = splits.train.categories[::10, 0], np.delete(splits.train.categories[:, 0], slice(None, None, 10))
    assert len(set(missing.tolist())) == 1
    assert not set(missing.tolist()) & set(others.tolist())


def test_a_share_of_the_rows_keeps_their_order(tmp_path: Path) -> None:
    """About half of the rows are kept, the same ones for the same seed."""
    write_criteo(tmp_path)
    half = read_log("criteo", tmp_path, share=0.5, seed=1)
    kept = np.concatenate([own.numbers[:, 0] for own in (half.train, half.validation, half.test)])
    kept = kept[~np.isnan(kept)]
    assert 30 < len(kept) < 70
    assert (np.diff(kept) > 0).all()


def _foreign(folder: Path) -> None:
    (folder / "train.txt").write_text("1\t2\t3\n")


def _damaged(folder: Path) -> None:
    write_criteo(folder)
    path = folder / "train.txt"
    path.write_text(path.read_text().replace("\t1\t", "\tabc\t", 1))


@pytest.mark.parametrize(
    ("name", "write", "about"),
    [
        ("criteo", lambda _: None, "expected a file train.txt or train.txt.gz"),
        ("criteo", _foreign, "train.txt: "),
        ("criteo", _damaged, "train.txt: "),
        ("flight", write_criteo, "expected a file 2006.csv or 2006.csv.gz or 2006.csv.bz2"),
        ("taxi", lambda _: None, "unknown data 'taxi': expected one of flight, avazu, criteo"),
    ],
)
def test_files_of_another_format_are_refused(
    tmp_path: Path, name: str, write: Callable[[Path], None], about: str
) -> None:
    """The message is one line that names the file."""
    write(tmp_path)
    with pytest.raises(ValueError, match=about) as refusal:
        read_log(name, tmp_path)
    assert "\n" not in str(refusal.value)


def categories(counts: list[int]) -> Rows:
    """Return rows of one category each, as often as counts say; the class is that of even rows."""
    column = np.repeat(np.arange(len(counts)), counts)[:, None]
    return Rows(np.zeros((len(column), 0), np.float32), column, (np.arange(len(column)) % 2).astype(np.int8))


def test_rare_and_unseen_categories_are_one() -> None:
    """In Pre1 and Pre2 a category needs 25 rows, in Pre3 ten, without the rarest hundredth; others have no ones."""
    rows = categories([30, 25, 24, 9])
    unseen = Rows(np.zeros((1, 0), np.float32), np.array([[9]]), np.zeros(1, np.int8))
    for name, kept in (("Pre1", 2), ("Pre2", 2), ("Pre3", 3)):
        encoder = Encoder(SCHEMES[name], rows)
        assert encoder.sizes == [kept + 1]
        assert encoder.codes(unseen).tolist() == [[0]]
        assert encoder.codes(rows)[[0, 30, 55, 79], 0].tolist() == [1, 2, 3 if kept == 3 else 0, 0]
        assert not encoder.vectors[0][0].any()
    many = Encoder(SCHEMES["Pre3"], categories([20] * 200))
    assert many.sizes == [199]


@pytest.mark.parametrize(("name", "width", "ones"), [("Pre1", 7, None), ("Pre2", 20, 2)])
def test_vectors_of_categories_differ(name: str, width: int, ones: int | None) -> None:
    """A hundred categories have seven bits, or two ones among twice ten places, and no two are equal."""
    encoder = Encoder(SCHEMES[name], categories([25] * 100))
    [vectors] = encoder.vectors
    assert vectors.shape == (101, width)
    assert len(np.unique(vectors, axis=0)) == 101
    assert ones is None or (vectors[1:].sum(axis=1) == ones).all()


def test_means_of_the_target_leave_out_the_own_part() -> None:
    """Pre3 adds 20 rows of the whole mean, and encodes rows of training with the other four parts."""
    column = np.tile([0, 1], 100)[:, None]
    y = np.zeros(200, np.int8)
    y[::2][:50] = 1  # half of the rows of category 0, a quarter of all
    rows = Rows(np.arange(200, dtype=np.float32)[:, None], column, y)
    encoder = Encoder(SCHEMES["Pre3"], rows)
    found = encoder.encode(rows)
    np.testing.assert_allclose(found[0, -2], (50 + 20 * 0.25) / 120, rtol=1e-6)
    np.testing.assert_allclose(found[1, -2], 20 * 0.25 / 120, rtol=1e-6)
    trained = encoder.encode(rows, trained=True)
    others = (np.arange(200) % 5 != 0) & (column[:, 0] == 0)
    np.testing.assert_allclose(trained[0, -2], (y[others].sum() + 5) / (others.sum() + 20), rtol=1e-6)
    assert encoder.sizes[0] == 3


def test_numbers_are_also_categories_of_32_bins() -> None:
    """Bins have equal rows, and a missing number has a bin of its own."""
    x = np.append(np.arange(640, dtype=np.float32), [np.nan] * 20)[:, None]
    rows = Rows(x, np.zeros((660, 0), np.int64), np.zeros(660, np.int8))
    codes = Encoder(SCHEMES["Pre3"], rows).codes(rows)[:, 0]
    assert len(set(codes.tolist())) == 33
    assert len(set(codes[:20].tolist())) == 1
    assert codes[0] != codes[20]
    assert codes[-1] not in codes[:-20]


def test_aims_hold_by_what_was_found() -> None:
    """Harm counts in the runs with drift and without, gains are compared with the best baseline, times with refit."""
    good = Run(
        drifts=True, encoded=True, adopted=True, returned=Gain(3.0, -2.0), seconds=Seconds(1.5, 1.0, 4.0, 9.0),
        latency=1.01,
        methods={
            "tuned": Gain(3.0, -2.0), "refit": Gain(1.0, -1.0), "continued": Gain(3.1, -2.0),
            "old and new rows": Gain(3.5, -2.5),
        },
    )  # fmt: skip
    still = Run(drifts=False, encoded=False, adopted=False, returned=Gain(0.0, 0.0))
    results = {"clicks": [good], "none": [still]}
    assert all(aim.holds for aim in aims_of(results))
    harmed = Run(
        drifts=True,
        encoded=False,
        adopted=True,
        returned=Gain(1.0, 0.2),
        equal=0.99,
        seconds=Seconds(3.0, 1.0, 4.0, 9.0),
    )
    found = {aim.text: aim.holds for aim in aims_of({"clicks": [harmed]})}
    assert found == {
        "harm in at most 5 % of the runs with drift": False,
        "leaves fitted (L1) in at most twice the time of LightGBM's refit": False,
        "the class of 99.9 % of the rows is that of their leaves": False,
        "latency within 3 %": True,
    }
    assert rows_of(results)[1][:6] == ["clicks", "1 of 1", "+3.0", "-2.0", "0", "+3.0 / -2.0"]
