"""Trace files: their content, and messages about malformed rows."""

from pathlib import Path

import pytest

from chrion.errors import ScenarioError, TraceError
from chrion.serving.simulator.traces import Arrivals, MinuteCounts, read_trace

FUNCTIONS_HEAD = "HashOwner,HashApp,HashFunction,Trigger,480,481,482\n"
LLM_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"

COLUMNS = "model,duration_ms,deadline_ms,priority,prompt_tokens,new_tokens,prefix_tokens,session,prefix"


def trace(folder: Path, kind: str, text: str) -> Arrivals | MinuteCounts:
    path = folder / "trace.csv"
    path.write_bytes(text.encode())
    return read_trace(kind, path)


def test_csv(tmp_path: Path) -> None:
    """Times are read in seconds, functions are numbered in order of appearance, and empty lines are skipped."""
    read = trace(tmp_path, "csv", "\ufefftime_s,model\n0,b\n\n0.5,a\n0.5,b\n")
    assert isinstance(read, Arrivals)
    assert read.times_s.tolist() == [0.0, 0.5, 0.5]
    assert read.functions.tolist() == [0, 1, 0]
    assert read.names == ("b", "a")


def test_azure_functions(tmp_path: Path) -> None:
    """Counts are by function and minute; the name of a function is its hash."""
    read = trace(tmp_path, "azure-functions-2019", FUNCTIONS_HEAD + "o,a,f,http,0,2,1\no,a,g,timer,1,0,0\n")
    assert isinstance(read, MinuteCounts)
    assert read.counts.tolist() == [[0, 2, 1], [1, 0, 0]]
    assert read.names == ("f", "g")


def test_azure_llm(tmp_path: Path) -> None:
    """Times with seven fractional digits become seconds since the first one; the trace names no functions."""
    rows = "2023-11-16 23:59:59.5000000,374,44\r\n2023-11-17 00:00:01.2500000,396,109\r\n"
    read = trace(tmp_path, "azure-llm-2023", LLM_HEAD + rows)
    assert isinstance(read, Arrivals)
    assert read.times_s.tolist() == [0.0, 1.75]
    assert read.names == ()


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (
            "csv",
            "time,model\n0,a\n",
            f"line 1: expected the header time_s or timestamp, then any of {COLUMNS}, found 'time,model'",
        ),
        ("csv", "time_s,model\n0,a\nx,a\n", "line 3, column time_s: expected seconds from 0 to 1e+12, found 'x'"),
        ("csv", "time_s,model\n-1,a\n", "line 2, column time_s: expected seconds from 0 to 1e+12, found '-1'"),
        ("csv", "time_s,model\ninf,a\n", "line 2, column time_s: expected seconds from 0 to 1e+12, found 'inf'"),
        ("csv", "time_s,model\n1e300,a\n", "line 2, column time_s: expected seconds from 0 to 1e+12, found '1e300'"),
        (
            "azure-functions-2019",
            FUNCTIONS_HEAD + "o,a,f,http,0,99999999999999999999,1\n",
            "line 2, column 481: expected a whole number of at least 0, found '99999999999999999999'",
        ),
        (
            "csv",
            "time_s,model\n2,a\n1,a\n",
            "line 3, column time_s: expected a time of at least the previous one, 2, found '1'",
        ),
        ("csv", "time_s,model\n0,a,b\n", "line 2: expected 2 columns, found 3"),
        ("csv", "time_s,model\n", "the trace has no requests"),
        (
            "csv",
            "",
            f"line 1: expected the header time_s or timestamp, then any of {COLUMNS}, found ''",
        ),
        ("azure-functions-2019", "HashOwner,HashApp\n", "line 1: expected the header HashOwner,HashApp,HashFunction"),
        (
            "azure-functions-2019",
            FUNCTIONS_HEAD + "o,a,f,http,0,-1,1\n",
            "line 2, column 481: expected a whole number of at least 0, found '-1'",
        ),
        ("azure-functions-2019", FUNCTIONS_HEAD + "o,a,f,http,0,1\n", "line 2: expected 7 columns, found 6"),
        ("azure-functions-2019", FUNCTIONS_HEAD + "o,a,f,http,0,0,0\n", "the trace has no requests"),
        (
            "azure-functions-2019",
            FUNCTIONS_HEAD.replace("482", "490"),
            "line 1, column 490: expected consecutive numbers of minutes, found '490'",
        ),
        ("azure-llm-2023", LLM_HEAD + "noon,1,1\n", "line 2, column TIMESTAMP: expected a time in ISO 8601 like"),
        (
            "azure-llm-2023",
            LLM_HEAD + "2023-11-16 18:15:46,1,x\n",
            "line 2, column GeneratedTokens: expected a whole number of at least 0, found 'x'",
        ),
        (
            "azure-llm-2023",
            LLM_HEAD + "2023-11-16 18:15:46,,1\n",
            "line 2, column ContextTokens: expected a whole number of at least 0, found ''",
        ),
        (
            "azure-llm-2023",
            LLM_HEAD + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n",
            "line 3, column TIMESTAMP: expected a time of at least the previous one",
        ),
    ],
)
def test_malformed_rows(tmp_path: Path, kind: str, text: str, message: str) -> None:
    """The message contains the line, the column, the expected and the found value."""
    with pytest.raises(TraceError) as caught:
        trace(tmp_path, kind, text)
    assert message in str(caught.value)
    assert str(tmp_path / "trace.csv") in str(caught.value)


def test_not_text(tmp_path: Path) -> None:
    """A file that is not UTF-8 is refused."""
    (tmp_path / "trace.csv").write_bytes(b"time_s,model\n0,\xff\n")
    with pytest.raises(TraceError, match="not a CSV file in UTF-8"):
        read_trace("csv", tmp_path / "trace.csv")


def test_missing_file(tmp_path: Path) -> None:
    """A missing trace is an error of the scenario."""
    with pytest.raises(ScenarioError, match="No such file"):
        read_trace("csv", tmp_path / "none.csv")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """A cached trace is not used after its file has changed."""
    first = trace(tmp_path, "csv", "time_s,model\n0,a\n")
    second = trace(tmp_path, "csv", "time_s,model\n0,a\n1,b\n")
    assert isinstance(first, Arrivals)
    assert isinstance(second, Arrivals)
    assert (len(first.names), len(second.names)) == (1, 2)


@pytest.mark.parametrize(
    "rows",
    ["2024-03-01T10:00:00Z,a\n2024-03-01T10:00:01.5Z,\n", "2024-03-01 10:00:00,a\n2024-03-01T10:00:01.500,\n"],
)
def test_iso_timestamps(tmp_path: Path, rows: str) -> None:
    """Timestamps count from the first row, with or without a time zone; a model may be empty."""
    (tmp_path / "t.csv").write_text(f"timestamp,model\n{rows}")
    trace = read_trace("csv", tmp_path / "t.csv")
    assert isinstance(trace, Arrivals)
    assert trace.times_s.tolist() == [0.0, 1.5]
    assert trace.names == ("a", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timestamp,model\n12,a\n", "line 2, column timestamp: expected a time in ISO 8601 like"),
        ("timestamp\n2024-03-01T10:00:00\n2024-03-01T10:00:00Z\n", "line 3, .*with or without a time zone as in"),
        (
            "timestamp\n2024-03-01T10:00:01\n2024-03-01T10:00:00\n",
            "line 3, .* at least the previous one, 2024-03-01T10:00:01, found",
        ),
        ("model,time_s\n", "line 1: expected the header time_s or timestamp"),
    ],
)
def test_bad_timestamps(tmp_path: Path, text: str, message: str) -> None:
    """The message names the line, the column and what was expected."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace("csv", tmp_path / "t.csv")
