"""Parts of machines: bundled files, files of users, and machines made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from chrion.errors import HardwareError
from chrion.hardware import Accelerator, Link, Processor, hardware, known_parts

ACCELERATOR = """
kind = "accelerator"
title = "Mine"
provider = "CUDAExecutionProvider"
link = "pcie-4"
[figures]
memory_gb = 8
bandwidth_gb_per_s = 100
launch_us = { value = 5, source = "a stopwatch" }
[matrix_tflops]
float32 = 10
[vector_tflops]
float32 = 2
"""
LINK = 'kind = "link"\ntitle = "Mine"\n[figures]\nbandwidth_gb_per_s = 10\nefficiency = 0.5\nlatency_us = 1\n'
#: The size of memory in GB and its bandwidth in GB/s, from the vendors' datasheets.
DATASHEETS = {
    "t4": (16, 320),
    "l4": (24, 300),
    "a10": (24, 600),
    "a100-40": (40, 1555),
    "a100-80": (80, 2039),
    "h100": (80, 3350),
    "h200": (141, 4800),
    "rtx-4090": (24, 1008),
    "gtx-1080-ti": (11, 484),
}


def written(folder: Path, text: str, name: str = "mine.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("name", "memory_and_bandwidth"), DATASHEETS.items())
def test_memory_of_bundled_accelerators_is_that_of_the_datasheet(
    name: str, memory_and_bandwidth: tuple[float, float]
) -> None:
    """The size and the bandwidth of each accelerator's memory."""
    part = known_parts()[name]
    assert isinstance(part, Accelerator)
    assert (part.memory_gb, part.bandwidth_gb_per_s) == memory_and_bandwidth


@pytest.mark.parametrize("name", known_parts())
def test_every_bundled_figure_has_a_source(name: str) -> None:
    """No figure of a bundled file is without the document that it is from, or the word that it is assumed."""
    part = known_parts()[name]
    assert part.figures
    assert all(len(figure.source) > 10 and ".toml" not in figure.source for figure in part.figures.values())


@pytest.mark.parametrize("name", known_parts())
def test_bundled_parts_are_plausible(name: str) -> None:
    """Caches are ordered, no core reads memory faster than all of them, and 8-bit products are not slower."""
    part = known_parts()[name]
    match part:
        case Processor():
            assert part.core_bandwidth_gb_per_s <= part.bandwidth_gb_per_s
            assert part.all_core_ghz <= part.clock_ghz
            assert [cache.bytes for cache in part.caches] == sorted(cache.bytes for cache in part.caches)
            rates = [cache.bytes_per_cycle for cache in part.caches]
            assert rates == sorted(rates, reverse=True)
            assert part.flops_per_cycle.int8 is not None
            assert part.flops_per_cycle.int8 >= part.flops_per_cycle.float32
        case Accelerator():
            assert part.matrix_tflops.float32 >= part.vector_tflops.float32
            assert isinstance(known_parts()[part.link], Link)
        case Link():
            # PCI Express: 16 lanes of 8, 16 or 32 GT/s with 128 bits in 130, in one direction.
            rate = {"pcie-3": 8, "pcie-4": 16, "pcie-5": 32}[name]
            assert part.bandwidth_gb_per_s == pytest.approx(rate * 16 * 128 / 130 / 8, rel=0.01)


def test_a_machine_of_two_parts_has_the_slower_link() -> None:
    """An L4 has PCI Express 4.0, an EPYC 9124 has 5.0, and a Xeon E5 has 3.0."""
    machine = hardware("l4+epyc-16")
    assert (machine.gpu_memory_gb, machine.cpu_cores) == (24, 16)
    assert machine.link is not None
    assert machine.link.name == "pcie-4"
    assert machine.pcie_gb_per_s == pytest.approx(31.5 * 0.76)
    other = hardware("xeon-12+l4")
    assert other.link is not None
    assert other.link.name == "pcie-3"
    given = hardware("l4+epyc-16+pcie-5")
    assert given.link is not None
    assert given.link.name == "pcie-5"


def test_speeds_are_ratios_of_rooflines() -> None:
    """min(peak, bandwidth * intensity) by hand: both machines bound by memory at 16, one by arithmetic at 30."""
    l4, gtx = hardware("l4"), hardware("gtx-1080-ti")
    assert l4.gpu_speed(gtx, 16) == pytest.approx(300 * 16 / (484 * 16))
    assert l4.gpu_speed(gtx, 30) == pytest.approx(300 * 30 / 11300)
    assert l4.gpu_speed(gtx, 1e4) == pytest.approx(60 / 11.3)
    with pytest.raises(HardwareError, match="has no accelerator"):
        l4.gpu_speed(hardware("epyc-16"))


def test_clocks_fall_linearly_with_busy_cores() -> None:
    """One busy core has the boost clock, all have the all-core clock; one core alone has the boost clock."""
    part = known_parts()["epyc-96"]
    assert isinstance(part, Processor)
    assert part.clock(1) == 3.7
    assert part.clock(96) == pytest.approx(3.55)
    assert part.clock(48) == pytest.approx(3.7 - 0.15 * 47 / 95)


def test_files_of_users_are_parts(tmp_path: Path) -> None:
    """A path ends in .toml, also if it contains a plus; numbers without a source have the file as their source."""
    machine = hardware(f"{written(tmp_path, ACCELERATOR)}+laptop-8")
    assert machine.accelerator is not None
    assert machine.accelerator.figures["memory_gb"].source == "mine.toml"
    assert machine.accelerator.figures["launch_us"].source == "a stopwatch"
    assert machine.accelerator.base_memory_mb == 0
    odd = written(tmp_path, ACCELERATOR, "a+b.toml")
    own_link = written(tmp_path, LINK, "link.toml")
    machine = hardware(f"{odd}+epyc-16+{own_link}")
    assert machine.pcie_gb_per_s == 5
    assert machine.title == "AMD EPYC 9124, Mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("l5", "hardware 'l5': unknown part 'l5'"),
        ("epyc16", "did you mean 'epyc-16'"),
        ("EPYC-16", "did you mean 'epyc-16'"),
        ("l4+", "unknown part ''"),
        ("", "unknown part ''"),
        ("l4+t4", "l4 and t4 are both of kind accelerator"),
        ("l4+epyc-16+pcie-3+pcie-4", "pcie-3 and pcie-4 are both of kind link"),
        ("pcie-3", "expected an accelerator or a processor"),
        ("missing.toml", "missing.toml: cannot be read: No such file"),
    ],
)
def test_wrong_names_are_refused(name: str, message: str) -> None:
    """The message is one line and names what is wrong."""
    with pytest.raises(HardwareError) as caught:
        hardware(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "accelerator"', 'kind = "gpu"', "kind: expected one of accelerator, processor, link"),
        ('kind = "accelerator"', "", "found None"),
        ('title = "Mine"', "", "title is missing"),
        ('title = "Mine"', "title = 3", "title: expected text"),
        ('title = "Mine"', 'title = "Mine"\nname = "x"', "unknown key 'name'"),
        ('title = "Mine"', 'title = "Mine"\nmemory_gb = 8', "unknown key 'memory_gb'"),
        ("memory_gb = 8", "", "figures.memory_gb is missing"),
        ("memory_gb = 8", 'memory_gb = 8\ntitle = "T"', "figures: unknown key 'title'"),
        ("memory_gb = 8", 'memory_gb = 8\nname = "x"', "figures: unknown key 'name'"),
        ("memory_gb = 8", "memory_gb = true", "memory_gb: expected a number"),
        ("memory_gb = 8", 'memory_gb = "8"', "memory_gb: expected a number"),
        ("memory_gb = 8", "memory_gb = -8", "memory_gb: expected a number above 0"),
        ("memory_gb = 8", "memory_gb = nan", "memory_gb: expected a number above 0"),
        ("memory_gb = 8", "memory_gb = inf", "memory_gb: expected a number of at most"),
        ("memory_gb = 8", "memory_gb = 0", "memory_gb: expected a number above 0"),
        ("memory_gb = 8", "memory_gb = { value = 8, source = 1 }", "figures.memory_gb.source: expected text"),
        ("memory_gb = 8", "memory_gb = { source = 'x' }", "memory_gb: expected a number"),
        (
            "memory_gb = 8",
            "memory_gb = 8\nmemori_gb = 8",
            "unknown key 'memori_gb' (did you mean 'memory_gb'?)",
        ),
        ("[matrix_tflops]\nfloat32 = 10", "[matrix_tflops]\nfloat16 = 10", "matrix_tflops.float32 is missing"),
        ("[matrix_tflops]\nfloat32 = 10", "matrix_tflops = 10", "figures: unknown key 'matrix_tflops'"),
        ("[matrix_tflops]", "[tensor_tflops]", "unknown key 'tensor_tflops'"),
        ("[matrix_tflops]", "[matrix_tflops", "not TOML"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    """The message is one line, names the file, and says what was found."""
    assert old in ACCELERATOR
    path = written(tmp_path, ACCELERATOR.replace(old, new))
    with pytest.raises(HardwareError) as caught:
        hardware(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_share_above_one_and_half_a_core_are_refused(tmp_path: Path) -> None:
    """The efficiency of a link is at most 1, and a number of cores is whole."""
    link = written(tmp_path, LINK.replace("0.5", "1.5"))
    with pytest.raises(HardwareError, match=r"efficiency: expected a number of at most 1, found 1\.5"):
        hardware(f"l4+{link}")
    text = (Path(__file__).parents[2] / "profiles/hardware/epyc-16.toml").read_text()
    assert "cores = { value = 16," in text
    half = written(tmp_path, text.replace("cores = { value = 16,", "cores = { value = 1.5,"))
    with pytest.raises(HardwareError, match=r"cores: expected a whole number"):
        hardware(half)


def test_the_link_of_a_part_must_be_a_link(tmp_path: Path) -> None:
    """A part that names another accelerator as its link is refused."""
    path = written(tmp_path, ACCELERATOR.replace('"pcie-4"', '"t4"'))
    with pytest.raises(HardwareError, match="link = 't4': it is of kind accelerator"):
        hardware(path)


def test_a_link_in_a_file_is_looked_for_beside_the_part(tmp_path: Path) -> None:
    """A part in another folder names its link by the file's name alone."""
    written(tmp_path, LINK, "link.toml")
    path = written(tmp_path, ACCELERATOR.replace('"pcie-4"', '"link.toml"'))
    assert hardware(path).pcie_gb_per_s == 5
    missing = written(tmp_path, ACCELERATOR.replace('"pcie-4"', '"no.toml"'))
    with pytest.raises(HardwareError, match=r"no\.toml: cannot be read: No such file"):
        hardware(missing)
